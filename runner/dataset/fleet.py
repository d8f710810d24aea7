"""Worker processes, seen from their parent."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import runner
from runner.dataset.crew import ENDING, Post
from runner.dataset.task import Failure, Task
from runner.dataset.wire import Message, Retrying, Start
from runner.errors import StoreUnreachable
from runner.storage.retrying import OnRetry

TOGETHER = 8
"""Tasks that a thread of a worker takes at a time: few enough to spread, enough to make the pipes cheap."""

THREADS = 32
"""In each process: a store's first byte takes milliseconds, in which others can work."""

PROCESSES_AT_MOST = 4

DYING = 1.0
"""Seconds in which the system ends a process that has closed its pipe, or was killed."""

STDERR = 2


def processes_here() -> int:
    """How many processes this machine keeps busy."""
    return min(len(os.sched_getaffinity(0)), PROCESSES_AT_MOST)


class Fleet:
    """Several worker processes that bring files. What they post comes from several threads."""

    def __init__(self, start: Start, processes: int, post: Post, on_retry: OnRetry) -> None:
        self.capacity = 2 * TOGETHER * start.threads * processes
        self._processes: list[_Process] = []
        try:
            for _ in range(processes):
                self._processes.append(_Process(start, post, on_retry))
        except BaseException:
            self.end()
            self.join(time.monotonic())
            raise

    def hand(self, tasks: Sequence[Task]) -> None:
        """Never waits for a process, not even for one that hangs."""
        for first in range(0, len(tasks), TOGETHER):
            min(self._processes, key=lambda process: process.flying()).hand(tasks[first : first + TOGETHER])

    def end(self) -> None:
        """Begin nothing more."""
        for process in self._processes:
            process.end()

    def join(self, until: float) -> None:
        """Wait for them to end, and post what they finish until then; what runs beyond ``until``, by the monotonic
        clock, is killed.
        """
        for process in self._processes:
            process.join(until)

    def close(self) -> None:
        """End them and wait, for a little while."""
        self.end()
        self.join(time.monotonic() + ENDING)


class _Process:
    """A child, a thread that writes to it, and one that reads from it: whoever hands out tasks never waits for it."""

    def __init__(self, start: Start, post: Post, on_retry: OnRetry) -> None:
        self._post = post
        self._on_retry = on_retry
        self._sent = self._answered = 0
        self._ending = False
        self._outgoing = SimpleQueue[bytes | None]()
        self._outgoing.put(pickle.dumps(start))
        self._child, self._in = _start_child()
        self._reader = threading.Thread(target=self._read, name=f"from-{self._child.pid}", daemon=True)
        writer = threading.Thread(target=self._write, name=f"to-{self._child.pid}", daemon=True)
        try:
            self._reader.start()
            writer.start()
        except BaseException:
            self._child.kill()
            self._child.wait()
            raise

    def flying(self) -> int:
        return self._sent - self._answered

    def hand(self, group: Sequence[Task]) -> None:
        self._sent += len(group)
        self._outgoing.put(pickle.dumps(list(group)))

    def end(self) -> None:
        self._ending = True
        self._outgoing.put(None)

    def join(self, until: float) -> None:
        self._reader.join(max(0.0, until - time.monotonic()))
        if self._reader.is_alive():
            self._child.kill()
            self._reader.join(DYING)

    def _write(self) -> None:
        assert self._child.stdin
        # When it has died the reader finds out, and says so.
        with suppress(BrokenPipeError), self._child.stdin as pipe:
            while (data := self._outgoing.get()) is not None:
                pipe.write(data)
                if self._outgoing.empty():
                    pipe.flush()

    def _read(self) -> None:
        error: Exception
        try:
            self._take_all()
        except BaseException as reason:  # noqa: BLE001 - a thread's edge, and pickle raises anything
            error = RuntimeError(f"a worker process ({self._end_of_child()}) sent what cannot be read: {reason!r}")
        else:
            ended = f"a worker process ended with {self._end_of_child()}"
            error = StoreUnreachable(ended, "did the system run out of memory?")
        if not self._ending:
            self._post([Failure("small files", error)])

    def _take_all(self) -> None:
        with self._in, suppress(EOFError):
            while True:
                self._take(pickle.load(self._in))  # noqa: S301 - our own child's

    def _take(self, message: Message) -> None:
        if isinstance(message, Retrying):
            self._on_retry(message.operation, message.error, message.wait)
        else:
            self._answered += len(message)
            self._post(message)

    def _end_of_child(self) -> int:
        """Its exit status; it is killed unless it has ended."""
        with suppress(subprocess.TimeoutExpired):
            return self._child.wait(DYING)
        self._child.kill()
        return self._child.wait()


def _start_child() -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """A child, and what it answers: by a pipe of its own, since anything may print to the standard output."""
    incoming, outgoing = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "runner.dataset.worker", str(outgoing)],
            stdin=subprocess.PIPE,
            stdout=STDERR,
            pass_fds=[outgoing],
            env={**os.environ, "PYTHONPATH": _own_path()},
            # In a group of its own: a Ctrl-C is for the parent.
            process_group=0,
        )
    except BaseException:
        os.close(incoming)
        raise
    finally:
        os.close(outgoing)
    return child, os.fdopen(incoming, "rb")


def _own_path() -> str:
    """Where this very package lies, for a child that must not look into the current folder."""
    own = str(Path(runner.__file__).parent.parent)
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
