"""How often to do something, and how fast something goes."""

from __future__ import annotations

from collections import deque

from runner.clock import Clock

WINDOW = 10.0
"""Seconds that a rate looks back."""


class Every:
    """Says once per ``seconds`` that it is time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._next = clock.now()

    def is_due(self) -> bool:
        now = self._clock.now()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Rate:
    """Bytes per second over the last few seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen = deque([(clock.now(), 0)])

    def after(self, total: int) -> float:
        """The rate, now that ``total`` bytes have come; 0 until there is something to tell."""
        now = self._clock.now()
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        return max(0, total - before) / (now - then) if now > then else 0.0
