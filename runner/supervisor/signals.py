"""Signals to the supervisor are events like any other: a handler posts, and returns."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from runner.core.events import Event, StopRequested
from runner.core.state import Ending
from runner.errors import ExitCode

# What a signal to the supervisor means. SIGTERM is a platform that takes the machine; SIGINT is a person.
REQUESTS = {
    signal.SIGTERM: Ending("preempted", ExitCode.PREEMPTED, "asked to leave by SIGTERM"),
    signal.SIGHUP: Ending("preempted", ExitCode.PREEMPTED, "the terminal has gone (SIGHUP)"),
    signal.SIGINT: Ending("stopped", ExitCode.INTERRUPTED, "stopped by Ctrl-C"),
}


@contextmanager
def signals_posted(post: Callable[[Event], None]) -> Iterator[None]:
    """Turn signals into events while the context lasts, and ignore them after it: how the job ended is decided, and
    the process must live to say so. An ignored SIGHUP (nohup) stays ignored.
    """

    def handler(number: int, _frame: FrameType | None) -> None:
        post(StopRequested(REQUESTS[signal.Signals(number)]))

    numbers = [number for number in REQUESTS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
