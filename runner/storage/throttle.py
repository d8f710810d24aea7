"""How many requests a store bears at once: halved when it asks for fewer, then one more after every round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.errors import StoreBusy

SETTLING = 1.0
"""Seconds after a halving in which further refusals are news of the past: those requests were under way already."""


class Throttle:
    """Turns for requests, at most ``most`` at the same time. Safe to use from many threads."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._changed = threading.Condition()
        self._limit = float(most)
        self._under_way = 0
        self._halved_at = -SETTLING

    @property
    def limit(self) -> int:
        """How many requests are allowed at this time."""
        return int(self._limit)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn and keep it while the block runs; learn from how it ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < int(self._limit))
            self._under_way += 1
        try:
            yield
        except StoreBusy:
            self._end(self._fewer)
            raise
        except BaseException:
            self._end(lambda: None)
            raise
        else:
            self._end(self._more)

    def _end(self, learn: Callable[[], None]) -> None:
        with self._changed:
            self._under_way -= 1
            learn()
            self._changed.notify_all()

    def _fewer(self) -> None:
        if self._now() - self._halved_at >= SETTLING:
            self._halved_at = self._now()
            self._limit = max(1.0, self._limit / 2)

    def _more(self) -> None:
        self._limit = min(float(self._most), self._limit + 1 / self._limit)
