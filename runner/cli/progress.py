"""Progress of long work: one moving line on a terminal, elsewhere one line every 10 seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from runner.dataset.sync import SyncProgress
from runner.errors import CloudrunError
from runner.units import format_duration, format_size

EVERY = 10.0
SHORT_WORK = 2.0


class SyncReport:
    """Tells how a dataset comes along. ``say`` prints a whole line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._moving = sys.stderr.isatty()
        self._told_at = self._began = time.monotonic()
        self._told_of_trouble_at = -EVERY
        self._open_line = self._waiting = False
        self._telling = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()

    def __call__(self, progress: SyncProgress) -> None:
        now = time.monotonic()
        with self._telling:
            if progress.phase == "done":
                self._end_line()
                self._say(f"data: {done(progress, now - self._began)}")
                if progress.left_out.count:
                    self._say(f"data: {warning(progress)}")
                self._began = now
            elif self._moving and now - self._began > SHORT_WORK:
                sys.stderr.write(f"\r\x1b[K[cloudrun] data: {words(progress)}")
                sys.stderr.flush()
                self._open_line = True
            elif now - self._told_at >= EVERY or (progress.phase == "waiting" and not self._waiting):
                self._told_at, self._waiting = now, progress.phase == "waiting"
                self._say(f"data: {words(progress)}")

    def retrying(self, operation: str, error: CloudrunError, wait: float) -> None:
        """Tell that the store failed; at most once per 10 seconds. May be called from any thread."""
        now = time.monotonic()
        with self._telling:
            if now - self._told_of_trouble_at >= EVERY:
                self._told_of_trouble_at = now
                self._end_line()
                self._say(f"data: {operation} failed ({error}); trying again in {format_duration(wait)}")

    def _end_line(self) -> None:
        if self._open_line:
            sys.stderr.write("\r\x1b[K")
            self._open_line = False


def words(progress: SyncProgress) -> str:
    match progress.phase:
        case "waiting":
            return progress.message
        case "checking":
            return f"checking {progress.files} of {progress.files_total} files"
        case "copying":
            return ", ".join(copying(progress))
        case _:
            return f"listing {progress.message}" + (f", {progress.listed} objects so far" if progress.listed else "")


def copying(progress: SyncProgress) -> Iterator[str]:
    of = "of" if progress.complete else "of at least"
    yield f"{progress.files} {of} {progress.files_total} files"
    yield f"{format_size(progress.bytes)} {of} {format_size(progress.bytes_total)}"
    if progress.rate:
        yield f"{format_size(progress.rate)}/s"
    if progress.eta is not None:
        yield f"{format_duration(progress.eta)} left"


def done(progress: SyncProgress, seconds: float) -> str:
    if not progress.files:
        return "everything is in the cache"
    return f"{progress.files} file(s), {format_size(progress.bytes)} fetched in {format_duration(seconds)}"


def warning(progress: SyncProgress) -> str:
    left_out = progress.left_out
    return (
        f"warning: {left_out.count} object(s) of {progress.message} cannot be files here and are left out: {left_out}"
    )
