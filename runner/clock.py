"""Time, as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Says what time it is, in seconds since the epoch."""

    def now(self) -> float: ...


class SystemClock:
    """Wall time that never runs backwards within one process.

    Deadlines are computed from the monotonic clock, anchored once: a clock that is stepped while a job runs
    must not shorten a grace period.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
