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
from runner.core.events import Noticed, Progressed, TrainerExited, TrainerStarted
from runner.supervisor.output import DiskLog, LineScanner, OutputReader, Progress, ProgressFinder, Tail, open_pipe
from runner.supervisor.segments import SegmentWriter
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import ShelfWatch
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

    def __init__(self, session: Session, run: int, number: int, watch: ShelfWatch) -> None:
        self.number = number
        self._session = session
        self._watch = watch
        self._rate = Rate()
        self._told_at = 0.0
        self._untold: Progressed | None = None
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._log = open_log(session, run, number)
        self._child = Child(session, self._log, self._progress)

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        """Return when the command runs, or cannot: then its exit tells why."""
        name = f"attempt {self.number}"
        threading.Thread(target=self._live, args=(argv, env, cwd), name=name, daemon=True).start()
        self._begun.wait()

    def signal(self, to: Recipient) -> None:
        number = signal.Signals[self._session.spec.stop.signal] if to == "ranks" else signal.SIGTERM
        self._child.trainer.signal(number, to)

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
        self._child.start(argv, env, cwd)
        if pid := self._child.trainer.pid:
            command = self._session.secrets.redact_text(shlex.join(argv))
            self._session.post(TrainerStarted(self.number, pid, command))
            self._watch.follow(self.number, self._ended)
        self._begun.set()
        ended = self._child.wait()
        self._ended.set()
        if ended.stuck:
            self._session.post(Noticed(f"processes that cannot be killed are left: {ended.stuck}"))
        if self._untold is not None:
            self._session.post(self._untold)
        self._watch.last_look(self.number, clean_exit=ended.returncode == 0)
        return TrainerExited(
            attempt=self.number,
            code=127 if ended.returncode is None else ended.returncode,
            tail=self._child.tail.lines(),
            fatal=self._child.scanner.fatal,
            retry=self._child.scanner.retry,
            not_started=ended.spawn_error or None,
        )

    def _progress(self, progress: Progress) -> None:
        """Told every few seconds, and at the end: where the trainer was when it died is worth knowing."""
        told = Progressed(self.number, progress.step, progress.total, self._rate.after(progress))
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
