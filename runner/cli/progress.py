"""Progress of long work: one moving line on a terminal, elsewhere one line every 10 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from runner.dataset.sync import SyncProgress
from runner.units import format_duration, format_size

EVERY = 10.0
SHORT_WORK = 2.0


class SyncReport:
    """Tells how a dataset comes along. ``say`` prints a whole line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._moving = sys.stderr.isatty()
        self._told_at = self._began = time.monotonic()
        self._open_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()

    def __call__(self, progress: SyncProgress) -> None:
        now = time.monotonic()
        if progress.phase == "done":
            self._end_line()
            self._say(f"data: {done(progress, now - self._began)}")
            self._began = now
        elif self._moving and now - self._began > SHORT_WORK:
            sys.stderr.write(f"\r\x1b[K[cloudrun] data: {words(progress)}")
            sys.stderr.flush()
            self._open_line = True
        elif now - self._told_at >= EVERY or progress.phase == "waiting":
            self._told_at = now
            self._say(f"data: {words(progress)}")

    def _end_line(self) -> None:
        if self._open_line:
            sys.stderr.write("\r\x1b[K")
            self._open_line = False


def words(progress: SyncProgress) -> str:
    if progress.message:
        return progress.message
    if progress.phase != "copying":
        return f"{progress.phase} ({progress.files_total} files known)" if progress.files_total else progress.phase
    moved, whole = format_size(progress.bytes), format_size(progress.bytes_total)
    return f"{progress.files} of {progress.files_total} files, {moved} of {whole}"


def done(progress: SyncProgress, seconds: float) -> str:
    if not progress.files:
        return "everything is in the cache"
    return f"{progress.files} file(s), {format_size(progress.bytes)} fetched in {format_duration(seconds)}"
