"""One life of the trainer: its process, its output, its checkpoints, its end."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.checkpoint.layout import attempt_name
from runner.core.actions import Recipient
from runner.core.events import Noticed, Progressed, TrainerExited, TrainerJoined, TrainerStarted
from runner.supervisor import channel
from runner.supervisor.conversation import Conversation
from runner.supervisor.output import DiskLog, LineScanner, OutputReader, Progress, ProgressFinder, Tail, open_pipe
from runner.supervisor.segments import SegmentWriter
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import ShelfWatch
from runner.supervisor.snapshots import Snapshots
from runner.supervisor.trainer import Exit, Trainer

TELL_PROGRESS_EVERY = 5.0
RATE_WINDOW = 120.0


class Child:
    """A command whose output is kept, shown and understood: the trainer, or the setup script."""

    def __init__(self, session: Session, log: SegmentWriter, tell: Callable[[Progress], None]) -> None:
        restart = session.spec.restart
        finder = ProgressFinder(tell, session.clock, session.spec.progress.pattern)
        self.trainer = Trainer()
        self.scanner = LineScanner(finder, restart.fatal_patterns, restart.retry_patterns)
        self.tail = Tail()
        self._session = session
        self._log = log
        self._reader: OutputReader | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        reading, writing = open_pipe()
        self._reader = OutputReader(
            reading,
            secrets=self._session.secrets,
            disk=DiskLog(self._log),
            scanner=self.scanner,
            tail=self.tail,
            console=self._session.terminal,
        )
        self._reader.start()
        try:
            self.trainer.start(argv, env=env, cwd=str(cwd), output_fd=writing)
        finally:
            os.close(writing)

    def wait(self) -> Exit:
        """Return when the command and all that it started have gone and their output is read."""
        assert self._reader is not None
        ended = self.trainer.wait()
        if not self._reader.finish():
            self._session.post(Noticed("the log's disk does not answer; the end of the output is not kept"))
        elif self._reader.error is not None:
            self._session.post(Noticed(f"the output could not be kept: {self._reader.error}"))
        return ended


class Attempt:
    """The trainer, from its start to TrainerExited, which is the last event of the attempt and always comes."""

    def __init__(self, session: Session, run: int, number: int, watch: ShelfWatch, snapshots: Snapshots) -> None:
        self.number = number
        self._session = session
        self._watch = watch
        self._socket_path = session.local.run_cache(run) / "socket"
        self._conversation = Conversation(session, number, watch, snapshots, self._progress_said)
        self._speaks = False
        self._has_warned = False
        self._telling = threading.Lock()
        self._rate = Rate()
        self._told_at = 0.0
        self._untold: Progressed | None = None
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._log = open_log(session, run, number)
        self._child = Child(session, self._log, self._progress_seen)

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        """Return when the command runs, or cannot: then its exit tells why."""
        name = f"attempt {self.number}"
        threading.Thread(target=self._live, args=(argv, env, cwd), name=name, daemon=True).start()
        self._begun.wait()

    def signal(self, to: Recipient) -> None:
        number = signal.Signals[self._session.spec.stop.signal] if to == "ranks" else signal.SIGTERM
        self._child.trainer.signal(number, to)

    def ask(self, reason: str, deadline: float | None) -> None:
        """Ask for a save: by the owner's signal where the spec names one, else over the socket."""
        if (name := self._session.spec.checkpoints.ask) is None:
            self._conversation.ask(reason, deadline)
        elif self._child.trainer.handles(signal.Signals[name]):
            self._child.trainer.signal(signal.Signals[name], "ranks")
        elif not self._has_warned:
            # A trainer that has not begun, or is at its end, or whose owner forgot: the signal would kill it.
            self._has_warned = True
            self._session.post(
                Noticed(f"not asked for a save (checkpoints.ask): the trainer has no handler for {name}")
            )

    def announce(self, deadline: float) -> None:
        self._conversation.stop(deadline)

    def kill(self) -> None:
        self._child.trainer.kill()

    def wait(self, within: float) -> None:
        """Return when the trainer has gone, after so many seconds at the latest."""
        self._ended.wait(within)

    def _live(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        try:
            exited = self._run(argv, env, cwd)
        except Exception as error:  # noqa: BLE001 - a thread's edge: whatever fails, the loop must hear of the end
            self.kill()
            exited = TrainerExited(self.number, 127, self._child.tail.lines(), not_started=f"{error!r}")
        finally:
            self._begun.set()
            self._ended.set()
            self._log.close()
        self._session.post(exited)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> TrainerExited:
        socket = self._conversation.open(self._socket_path)
        self._child.start(argv, {**env, "CLOUDRUN_SOCKET": socket}, cwd)
        if pid := self._child.trainer.pid:
            command = self._session.secrets.redact_text(shlex.join(argv))
            self._session.post(TrainerStarted(self.number, pid, command))
            self._watch.follow(self.number, self._ended)
            if self._session.spec.checkpoints.ask is not None:
                self._session.post(TrainerJoined(self.number))
        self._begun.set()
        ended = self._child.wait()
        self._ended.set()
        if ended.stuck:
            self._session.post(Noticed(f"processes that cannot be killed are left: {ended.stuck}"))
        unsaved = self._conversation.finish()
        if self._untold is not None:
            self._session.post(self._untold)
        self._watch.last_look(self.number, clean_exit=ended.returncode == 0)
        if unsaved and ended.returncode == 0:
            raise OSError(unsaved)  # a training whose end is not on the disk has not ended well
        return TrainerExited(
            attempt=self.number,
            code=127 if ended.returncode is None else ended.returncode,
            tail=self._child.tail.lines(),
            fatal=self._child.scanner.fatal,
            retry=self._child.scanner.retry,
            not_started=ended.spawn_error or None,
        )

    def _progress_seen(self, progress: Progress) -> None:
        """Found in the output: heard as long as the trainer itself says nothing."""
        if not self._speaks:
            self._progress(progress, None)

    def _progress_said(self, said: channel.Progress) -> None:
        self._speaks = True
        self._progress(Progress(said.step, said.total, self._session.clock.now()), said.loss)

    def _progress(self, progress: Progress, loss: float | None) -> None:
        """Told every few seconds, and at the end: where the trainer was when it died is worth knowing."""
        with self._telling:
            told = Progressed(self.number, progress.step, progress.total, self._rate.after(progress), loss)
            last = progress.total is not None and progress.step >= progress.total
            if progress.at - self._told_at >= TELL_PROGRESS_EVERY or last:
                self._told_at, self._untold = progress.at, None
                self._session.post(told)
            else:
                self._untold = told


class Rate:
    """Steps per second over the last two minutes."""

    def __init__(self) -> None:
        self._seen: deque[Progress] = deque()

    def after(self, progress: Progress) -> float | None:
        """The rate with this progress counted; None until two reports are a moment apart."""
        if self._seen and progress.step < self._seen[-1].step:
            self._seen.clear()
        self._seen.append(progress)
        while progress.at - self._seen[0].at > RATE_WINDOW:
            self._seen.popleft()
        first = self._seen[0]
        seconds = progress.at - first.at
        return (progress.step - first.step) / seconds if seconds > 0 else None


def open_log(session: Session, run: int, attempt: int) -> SegmentWriter:
    """The record of an attempt's output. Setup, which runs before the trainer, writes to the same one."""
    name = attempt_name(attempt, session.id)
    return SegmentWriter(lambda n: session.local.log_segment(run, name, n))
