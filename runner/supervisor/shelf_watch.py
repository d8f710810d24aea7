"""Watches the checkpoint folder while a trainer runs, and keeps what was found there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from runner.checkpoint.local import Found, Shelf, local_files
from runner.core.events import CheckpointSaved, Noticed
from runner.core.state import Checkpoint
from runner.supervisor.session import Session

LOOK_EVERY = 1.0
LONGEST_PAUSE = 60.0
# A folder with very many files is looked at less often: the looks must not cost more than this share of a core.
SHARE_OF_A_CORE = 0.005


class ShelfWatch:
    """One folder, for the whole session: a checkpoint is told once, however many attempts see it.

    Events are posted while the lock is held: what is told of an attempt is told before its last look returns.
    """

    def __init__(self, session: Session, folder: Path) -> None:
        self._post = session.post
        self._clock = session.clock
        self._shelf = Shelf(folder, session.spec.checkpoints.format)
        self._lock = threading.Lock()
        self._found: dict[str, Found] = {}
        self._attempt: int | None = None
        self._blind = False

    def first_look(self, *, clean_exit: bool) -> list[Found]:
        """What an earlier supervisor's trainer left here. Raises OSError when the folder cannot be read."""
        with self._lock:
            found = self._keep(self._shelf.last_look(self._clock.now(), clean_exit))
            self._tell_refused()
            return found

    def follow(self, attempt: int, ended: threading.Event) -> None:
        """Look again and again, in a thread of its own, until ``ended``."""
        with self._lock:
            self._attempt = attempt

        def work() -> None:
            pause = LOOK_EVERY
            while not ended.wait(pause):
                began = time.thread_time()
                self._look()
                pause = min(max(LOOK_EVERY, (time.thread_time() - began) / SHARE_OF_A_CORE), LONGEST_PAUSE)

        threading.Thread(target=work, name="checkpoints", daemon=True).start()

    def last_look(self, attempt: int, *, clean_exit: bool) -> None:
        """The trainer has gone: tell what it finished. Raises OSError when the folder cannot be read."""
        with self._lock:
            self._attempt = None
            self._tell(attempt, self._shelf.last_look(self._clock.now(), clean_exit))
            self._tell_refused()

    def look_again(self, attempt: int) -> None:
        """After files changed behind our back: tell what is there now, unless a running trainer is being followed."""
        with self._lock:
            if self._attempt is None:
                self._tell_if_readable(attempt, lambda now: self._shelf.last_look(now, clean_exit=False))

    def _tell_refused(self) -> None:
        """What looks complete and is not used must not be a riddle to its owner."""
        for name, reason in self._shelf.doubtful:
            self._post(Noticed(f"{name} is not used: {reason}"))

    def find(self, checkpoint: Checkpoint) -> Found | None:
        """The files of a local checkpoint, as long as they are the ones that were told."""
        with self._lock:
            found = self._found.get(checkpoint.id)
        return found if found is not None and found.signature == checkpoint.signature else None

    def _look(self) -> None:
        with self._lock:
            if self._attempt is not None:
                self._tell_if_readable(self._attempt, self._shelf.look)

    def _tell_if_readable(self, attempt: int, look: Callable[[float], list[Found]]) -> None:
        """A folder that cannot be read just now (a network disk) is no reason to stop looking."""
        try:
            found = look(self._clock.now())
            self._blind = False
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a notice
            if not self._blind:
                self._post(Noticed(f"cannot look for checkpoints, and try again: {error}"))
            self._blind = True
            return
        self._tell(attempt, found)

    def _tell(self, attempt: int, found: list[Found]) -> None:
        for one in self._keep(found):
            checkpoint = one.as_checkpoint(one.step or 0, attempt)
            self._post(CheckpointSaved(attempt, checkpoint, step_known=one.step is not None))

    def _keep(self, found: list[Found]) -> list[Found]:
        """Remember what is told; what the trainer has deleted since is forgotten."""
        if found:
            self._found = {id_: one for id_, one in self._found.items() if one.path.exists()}
            self._found |= {one.as_checkpoint(0).id: one for one in found}
        return found


def is_unchanged(found: Found) -> bool:
    """True while the files on the disk are those that were found."""
    try:
        return tuple(file for file, _ in local_files(found.path)) == found.files
    except OSError:
        return False
