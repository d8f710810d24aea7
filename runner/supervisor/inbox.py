"""One inbox: whatever happens, anywhere, becomes an event here."""

from __future__ import annotations

import queue

from runner.clock import Clock
from runner.core.events import Event, Woke

# The longest nap. Long waits are cut so that a stepped or suspended clock is noticed.
LONGEST_WAIT = 60.0
SHORTEST_WAIT = 0.001


class Inbox:
    """Events in the order of their arrival. ``post`` may be called from threads and from signal handlers."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def post(self, event: Event) -> None:
        self._events.put(event)

    def wait(self, until: float, clock: Clock) -> Event:
        """The next event, or Woke when ``until`` (epoch seconds) has come."""
        patience = min(max(until - clock.now(), SHORTEST_WAIT), LONGEST_WAIT)
        try:
            return self._events.get(timeout=patience)
        except queue.Empty:
            return Woke()
