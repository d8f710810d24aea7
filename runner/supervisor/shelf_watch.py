"""Watches the checkpoint folder while a trainer runs, and keeps what was found there."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from runner.checkpoint.local import Found, Shelf
from runner.clock import Clock
from runner.core.events import CheckpointSaved
from runner.core.state import Checkpoint
from runner.supervisor.session import Session

LOOK_EVERY = 1.0


class ShelfWatch:
    """One folder, for the whole session: a checkpoint is told once, however many attempts see it."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._post = session.post
        self._clock: Clock = session.clock
        self._shelf = Shelf(folder, session.spec.checkpoints.format)
        self._lock = threading.Lock()
        self._found: dict[str, Found] = {}
        self._attempt: int | None = None

    def first_look(self, *, clean_exit: bool) -> list[Found]:
        """What an earlier supervisor's trainer left here."""
        with self._lock:
            return self._keep(self._shelf.last_look(self._clock.now(), clean_exit))

    def follow(self, attempt: int, ended: threading.Event) -> None:
        """Look again and again, in a thread of its own, until ``ended``."""
        with self._lock:
            self._attempt = attempt

        def work() -> None:
            while not ended.wait(LOOK_EVERY):
                self._look()

        threading.Thread(target=work, name="checkpoints", daemon=True).start()

    def last_look(self, attempt: int, *, clean_exit: bool) -> None:
        """The trainer has gone: tell what it finished."""
        with self._lock:
            self._attempt = None
            found = self._keep(self._shelf.last_look(self._clock.now(), clean_exit))
        self._tell(attempt, found)

    def look_again(self, attempt: int) -> None:
        """After files changed behind our back: tell what is there now, unless a running trainer is being followed."""
        with self._lock:
            if self._attempt is not None:
                return
            found = self._keep(self._shelf.last_look(self._clock.now(), clean_exit=False))
        self._tell(attempt, found)

    def find(self, checkpoint: Checkpoint) -> Found | None:
        """The files of a local checkpoint, as long as they are the ones that were told."""
        with self._lock:
            found = self._found.get(checkpoint.id)
        return found if found is not None and found.signature == checkpoint.signature else None

    def _look(self) -> None:
        with self._lock:
            attempt = self._attempt
            found = self._keep(self._shelf.look(self._clock.now())) if attempt is not None else []
        if attempt is not None:
            self._tell(attempt, found)

    def _keep(self, found: Iterable[Found]) -> list[Found]:
        kept = list(found)
        self._found |= {one.as_checkpoint(one.step or 0).id: one for one in kept}
        return kept

    def _tell(self, attempt: int, found: Iterable[Found]) -> None:
        for one in found:
            checkpoint = one.as_checkpoint(one.step or 0, attempt)
            self._post(CheckpointSaved(attempt, checkpoint, step_known=one.step is not None))
