"""Watches the checkpoints' places while a trainer runs, and keeps in mind what was found there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from runner.checkpoint.copies import PrivateCopies
from runner.checkpoint.local import Found, Shelf
from runner.checkpoint.places import Places
from runner.core.events import CheckpointSaved, Noticed
from runner.core.state import Checkpoint
from runner.supervisor.session import Session

LOOK_EVERY = 1.0
LONGEST_PAUSE = 60.0
# A folder with very many files is looked at less often: the looks must not cost more than this share of a core.
SHARE_OF_A_CORE = 0.005


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a save before it is complete.

    since     epoch seconds at which the trainer went on
    stall     seconds for which it stood still, None where nobody measured
    metrics   what it measured at this step
    """

    since: float
    stall: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()


def places_of(session: Session, run: int) -> Places:
    """Where the run's checkpoints lie: what matches the spec's globs below the workdir, else one folder's children."""
    if globs := session.spec.checkpoint_globs:
        return Places(session.spec.working_directory, globs)
    return Places(session.folders(run).checkpoints)


def copies_of(session: Session, run: int) -> Path:
    """Where private copies go: beside what is set aside, which shares the checkpoints' file system."""
    aside = session.folders(run).set_aside
    return aside.with_name(aside.name.replace("set-aside", "copies"))


class ShelfWatch:
    """The places, for the whole session: a checkpoint is told once, however many attempts see it.

    Events are posted while the lock is held: what is told of an attempt is told before its last look returns.
    Private copies go into the folder ``copies``; without one, uploads read the trainer's own files.
    """

    def __init__(self, session: Session, where: Path | Places, copies: Path | None = None) -> None:
        wanted = session.spec.checkpoints.format
        self._post = session.post
        self._clock = session.clock
        self._shelf = Shelf(where, wanted)
        self._copies = PrivateCopies(copies, wanted) if copies is not None else None
        self._lock = threading.Lock()
        self._found: dict[str, Found] = {}
        self._attempt: int | None = None
        self._blind = False
        self._begun: dict[str, Begun] = {}
        self._last_cost = 0.0
        self._wake = threading.Event()

    def first_look(self, *, clean_exit: bool) -> list[Found]:
        """What an earlier supervisor's trainer left here. Raises OSError when the folder cannot be read."""
        with self._lock:
            found = self._keep(self._shelf.last_look(self._clock.now(), clean_exit))
            self._tell_refused()
            return found

    def follow(self, attempt: int, ended: threading.Event) -> None:
        """Look again and again, in a thread of its own, until ``ended``."""
        self._wake.clear()
        with self._lock:
            self._attempt = attempt

        def work() -> None:
            pause = LOOK_EVERY
            while not self._rest(pause, ended):
                self._look()
                pause = min(max(LOOK_EVERY, self._last_cost / SHARE_OF_A_CORE), LONGEST_PAUSE)

        threading.Thread(target=work, name="checkpoints", daemon=True).start()

    def expect(self, name: str, begun: Begun) -> None:
        """An entry of this name will be complete before long; what is known of its save is told with it."""
        with self._lock:
            self._begun[name] = begun

    def look_now(self) -> None:
        """Something has just been completed: tell it at once, if a trainer is being followed. Never waits."""
        self._wake.set()

    def _rest(self, pause: float, ended: threading.Event) -> bool:
        """Whether it is over, once the pause is; one of the two may wake us before."""
        self._wake.wait(pause)
        if not ended.is_set():
            self._wake.clear()
        return ended.is_set()

    def last_look(self, attempt: int, *, clean_exit: bool) -> None:
        """The trainer has gone: tell what it finished. Raises OSError when the folder cannot be read."""
        self._wake.set()
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
        """What to upload a local checkpoint from: a private copy, else the trainer's own files (:meth:`on_shelf`).

        A copy stays until another is asked for, or :meth:`stored` says that it has done its service.
        """
        with self._lock:
            copy = self._copies.lend(checkpoint.signature) if self._copies is not None else None
        return copy or self.on_shelf(checkpoint)

    def on_shelf(self, checkpoint: Checkpoint) -> Found | None:
        """The trainer's own files of a local checkpoint, as long as they are the ones that were told."""
        with self._lock:
            found = self._found.get(checkpoint.id)
        return found if found is not None and found.signature == checkpoint.signature else None

    def stored(self, checkpoint: Checkpoint) -> None:
        """The checkpoint is in the store: its private copy goes."""
        with self._lock:
            if self._copies is not None:
                self._copies.give_back(checkpoint.signature)

    def _look(self) -> None:
        with self._lock:
            if self._attempt is not None:
                self._tell_if_readable(self._attempt, self._shelf.look)

    def _tell_if_readable(self, attempt: int, look: Callable[[float], list[Found]]) -> None:
        """A folder that cannot be read just now (a network disk) is no reason to stop looking."""
        began = time.thread_time()
        try:
            found = look(self._clock.now())
            self._blind = False
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a notice
            if not self._blind:
                self._post(Noticed(f"cannot look for checkpoints, and try again: {error}"))
            self._blind = True
            return
        finally:
            self._last_cost = time.thread_time() - began
        self._tell(attempt, found)

    def _tell(self, attempt: int, found: list[Found]) -> None:
        for one in found:
            checkpoint = one.as_checkpoint(one.step or 0, attempt)
            begun = self._begun.pop(one.path.name, None)
            saved = CheckpointSaved(attempt, checkpoint, step_known=one.step is not None)
            self._post(saved if begun is None else self._with_cost(saved, begun))
        self._keep(found)

    def _with_cost(self, saved: CheckpointSaved, begun: Begun) -> CheckpointSaved:
        persist = max(0.0, self._clock.now() - begun.since)
        checkpoint = replace(saved.checkpoint, metrics=begun.metrics or saved.checkpoint.metrics)
        return replace(saved, checkpoint=checkpoint, stall=begun.stall, persist=persist)

    def _keep(self, found: list[Found]) -> list[Found]:
        """Remember what is told; what the trainer has deleted since is forgotten. The newest gets a private copy: who
        asks for it meanwhile waits.
        """
        if found:
            self._found = {id_: one for id_, one in self._found.items() if one.path.exists()}
            self._found |= {one.as_checkpoint(0).id: one for one in found}
            if self._copies is not None:
                self._copies.take(found[-1])
        return found
