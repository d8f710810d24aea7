"""What a trainer and its supervisor say to each other over the socket, in one attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.core.events import Noticed, TrainerJoined
from runner.core.state import Environment
from runner.supervisor.channel import Channel, Digest, Hello, Message, Progress, Remark, Saved, Snapshot
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import Begun, ShelfWatch
from runner.supervisor.snapshots import Announced, Answer, Passed, Snapshots, SnapshotWriter

LONGEST_REMARK = 500
MOST_REMARKS = 100


class Conversation:
    """From ``open`` to ``finish``. ``progress`` hears how far the first rank is."""

    def __init__(
        self,
        session: Session,
        attempt: int,
        watch: ShelfWatch,
        snapshots: Snapshots,
        progress: Callable[[Progress], None],
    ) -> None:
        self._session = session
        self._attempt = attempt
        self._watch = watch
        self._progress = progress
        self._remarks = 0
        self._joined: dict[int, Hello] = {}
        self._is_joined = False
        self._stop: dict[str, Any] | None = None
        self._hurried = False
        self._channel = Channel(self._hear, snapshots.welcome, self._remark)
        self._writer = SnapshotWriter(snapshots, watch, self._answer, self._remark)

    def open(self, path: Path) -> str:
        """Where the trainer finds the socket; empty when there can be none: then it saves by itself."""
        self._writer.start()
        try:
            return str(self._channel.open(path))
        except OSError as error:
            self._remark(f"the trainer cannot talk to us: no socket at {path}: {error.strerror}")
            return ""

    def ask(self, reason: str, deadline: float | None) -> None:
        """Ask all ranks for a save. Returns at once. With a deadline it is brought to the disk as fast as it goes."""
        self._hurried = deadline is not None
        self._channel.tell("save", {"reason": reason, "deadline": deadline})

    def stop(self, deadline: float) -> None:
        """Tell all ranks to stop, also those that say hello later. Returns at once."""
        self._stop = {"deadline": deadline}
        self._hurried = True
        self._channel.tell("stop", self._stop)

    def finish(self) -> str:
        """The trainer has gone: take what it said last, and save the newest step that it finished.

        Answers why that cannot be saved; empty when nothing is lost.
        """
        self._channel.close()
        return self._writer.finish()

    # -- what the trainer says, in the channel's thread ----------------------------------------------------------------

    def _hear(self, rank: int, message: Message) -> None:
        now = self._session.clock.now()
        match message:
            case Hello():
                self._join(message)
            case Progress(step):
                self._writer.hear(Passed(rank, step))
                if rank == 0:
                    self._progress(message)
            case Snapshot(slot, sequence, step, stall, metrics):
                self._writer.hear(Announced(rank, slot, sequence, step, now, stall, metrics, self._hurried))
            case Saved(path, _, seconds, metrics):
                self._watch.expect(Path(path).name, Begun(now, seconds, metrics))
                self._watch.look_now()
            case Digest(step, value, kind):
                self._remark(f"the state of rank {rank} at step {step} has the {kind} digest {value}")
            case Remark(text):
                self._remark(text)

    def _join(self, hello: Hello) -> None:
        """Ranks that come back after a restart of their own say hello again."""
        self._joined[hello.rank] = hello
        if self._stop is not None:
            self._channel.tell("stop", self._stop, hello.rank)
        if not self._is_joined and len(self._joined) >= hello.world:
            self._is_joined = True
            environment = Environment(hello.world, hello.threads, hello.cpu)
            self._session.post(TrainerJoined(self._attempt, environment))

    def _answer(self, answer: Answer) -> None:
        body: dict[str, Any] = {"slot": answer.slot, "sequence": answer.sequence}
        if answer.refused:
            self._channel.tell("refused", body | {"reason": answer.refused}, answer.rank)
        else:
            self._channel.tell("persisted", body, answer.rank)

    def _remark(self, text: str) -> None:
        """For the record. A trainer that talks without end must not fill the disk."""
        self._remarks += 1
        if self._remarks < MOST_REMARKS:
            self._session.post(Noticed(text[:LONGEST_REMARK]))
        elif self._remarks == MOST_REMARKS:
            self._session.post(Noticed("the trainer makes many remarks: no more are kept of this attempt"))
