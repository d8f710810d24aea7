"""Waiting for one's turn, with an end: nobody may hang in a wait after he was told to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runner.errors import StoreUnreachable

LOOK = 0.5
"""Seconds between two questions whether to wait any longer: each costs next to nothing, and only who waits asks."""

IsOver = Callable[[], bool]
"""Says whether nobody needs to wait any more: :meth:`runner.storage.retrying.Retry.is_over`."""


def never_over() -> bool:
    """For those who wait as long as it takes."""
    return False


def wait_until(ready: Callable[[], bool], changed: threading.Condition, is_over: IsOver) -> None:
    """Wait, with ``changed`` held. Raises StoreUnreachable when it is over before it is ``ready``."""
    while not ready():
        if is_over():
            raise StoreUnreachable("the request was not sent: there was no time left to wait for its turn")
        changed.wait(LOOK)
