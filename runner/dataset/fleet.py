"""Worker processes, seen from their parent."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import runner
from runner.dataset.crew import Post
from runner.dataset.task import Failure, Message, Retrying, Start, Task
from runner.errors import StoreUnreachable
from runner.storage.retrying import OnRetry

TOGETHER = 8
"""Tasks that a thread of a worker takes at a time: few enough to spread, enough to make the pipes cheap."""

THREADS = 32
"""In each process: a store's first byte takes milliseconds, in which others can work."""

PROCESSES_AT_MOST = 4


def processes_here() -> int:
    """How many processes this machine keeps busy."""
    return min(len(os.sched_getaffinity(0)), PROCESSES_AT_MOST)


class Fleet:
    """Several worker processes that bring files. What they post comes from several threads."""

    def __init__(self, start: Start, processes: int, post: Post, on_retry: OnRetry) -> None:
        self.capacity = 2 * TOGETHER * start.threads * processes
        self._processes = [_Process(start, post, on_retry) for _ in range(processes)]

    def hand(self, tasks: Sequence[Task]) -> None:
        for first in range(0, len(tasks), TOGETHER):
            min(self._processes, key=lambda process: process.flying()).hand(tasks[first : first + TOGETHER])
        for process in self._processes:
            process.flush()

    def close(self) -> None:
        """End them and wait; what they finished has been posted by then."""
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.join()


class _Process:
    def __init__(self, start: Start, post: Post, on_retry: OnRetry) -> None:
        self._post = post
        self._on_retry = on_retry
        self._sent = self._answered = 0
        self._ending = False
        # In a group of its own: a Ctrl-C is for the parent.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "runner.dataset.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _own_path()},
            process_group=0,
        )
        assert self._child.stdin
        assert self._child.stdout
        self._out, self._in = self._child.stdin, self._child.stdout
        with suppress(BrokenPipeError):
            self._out.write(pickle.dumps(start))
            self._out.flush()
        self._reader = threading.Thread(target=self._read, name=f"worker-{self._child.pid}")
        self._reader.start()

    def flying(self) -> int:
        return self._sent - self._answered

    def hand(self, group: Sequence[Task]) -> None:
        self._sent += len(group)
        # When it has died the reader finds out, and says so.
        with suppress(BrokenPipeError):
            self._out.write(pickle.dumps(list(group)))

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._out.flush()

    def end(self) -> None:
        self._ending = True
        with suppress(BrokenPipeError):
            self._out.close()

    def join(self) -> None:
        self._reader.join()

    def _read(self) -> None:
        with self._in, suppress(EOFError, pickle.UnpicklingError):
            while True:
                self._take(pickle.load(self._in))  # noqa: S301 - our own child's
        code = self._child.wait()
        if not self._ending:
            error = StoreUnreachable(f"a worker process ended with {code}", "did the system run out of memory?")
            self._post([Failure("small files", error)])

    def _take(self, message: Message) -> None:
        if isinstance(message, Retrying):
            self._on_retry(message.operation, message.error, message.wait)
        else:
            self._answered += len(message)
            self._post(message)


def _own_path() -> str:
    """Where this very package lies, for a child that must not look into the current folder."""
    own = str(Path(runner.__file__).parent.parent)
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
