"""A monitor watches one thing outside and says what it saw; it decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from runner.core.events import Event, Noticed


class Monitor(Protocol):
    """One source of signals."""

    @property
    def name(self) -> str:
        """What status calls it."""
        ...

    @property
    def every(self) -> float:
        """Seconds between two polls."""
        ...

    def poll(self) -> Iterable[Event]:
        """What is new since the last poll. An error means that the source could not be read this time."""
        ...


def watch(monitor: Monitor, post: Callable[[Event], None], leaving: threading.Event) -> threading.Thread:
    """Poll in a thread of its own until ``leaving`` is set."""

    def work() -> None:
        blind = False
        while not leaving.wait(monitor.every):
            try:
                events = list(monitor.poll())
                blind = False
            except Exception as error:  # noqa: BLE001 - a thread's edge: a monitor that fails once may see again
                events = [] if blind else [Noticed(f"{monitor.name}: cannot look: {error}")]
                blind = True
            for event in events:
                post(event)

    thread = threading.Thread(target=work, name=f"monitor {monitor.name}", daemon=True)
    thread.start()
    return thread
