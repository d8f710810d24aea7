"""How many requests a store bears at once: halved when it asks for fewer, then one more after every round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from runner.errors import StoreBusy
from runner.storage.waiting import IsOver, never_over, wait_until

SETTLING = 1.0
"""Seconds after a halving in which further refusals are news of the past: those requests were under way already."""


class Throttle:
    """Turns for requests, at most ``most`` at the same time. Safe to use from many threads.

    Who waits for a turn is told StoreUnreachable once ``is_over``.
    """

    def __init__(self, most: int, is_over: IsOver = never_over, *, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._is_over = is_over
        self._now = now
        self._changed = threading.Condition(threading.Lock())
        self._limit = float(most)
        self._under_way = 0
        self._halved_at = -SETTLING
        self._turn = Turn(self)

    @property
    def limit(self) -> int:
        """How many requests are allowed at this time."""
        return int(self._limit)

    def turn(self) -> Turn:
        """Waits for a turn, keeps it while the block runs, and learns from how it ends."""
        return self._turn

    def begin(self) -> None:
        """Wait for a turn. Each must :meth:`end`."""
        with self._changed:
            if not self._is_free():
                wait_until(self._is_free, self._changed, self._is_over)
            self._under_way += 1

    def end(self, outcome: type[BaseException] | None) -> None:
        """Give the turn back, and say how it went."""
        with self._changed:
            self._under_way -= 1
            if outcome is None:
                self._limit = min(float(self._most), self._limit + 1 / self._limit)
            elif issubclass(outcome, StoreBusy):
                self._fewer()
            # One for each free turn: to wake all of them would make them fight for it.
            self._changed.notify(max(0, int(self._limit) - self._under_way))

    def _is_free(self) -> bool:
        return self._under_way < int(self._limit)

    def _fewer(self) -> None:
        if self._now() - self._halved_at >= SETTLING:
            self._halved_at = self._now()
            self._limit = max(1.0, self._limit / 2)


class Turn:
    """A throttle as the context of a request. It keeps nothing of its own, so one serves all."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle

    def __enter__(self) -> None:
        self._throttle.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._throttle.end(kind)
