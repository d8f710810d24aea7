"""Other processes: their locks, their requests, and the threads that look for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from runner.clock import SystemClock
from runner.core.events import Event, Noticed, StopRequested, Woke
from runner.files import locked
from runner.monitors.api import watch
from runner.monitors.files import StopRequests, request_stop
from runner.wiring.supervision import take
from tests.supervisor.sessions import Posted


def test_a_command_that_looks_at_the_lock_keeps_nobody_from_starting(tmp_path: Path) -> None:
    taken = threading.Event()

    def look() -> None:
        with locked(tmp_path / "lock"):
            taken.set()
            time.sleep(0.2)

    threading.Thread(target=look).start()
    taken.wait(5.0)
    with ExitStack() as held:
        assert take(tmp_path / "lock", held, SystemClock())


def test_a_supervisor_that_keeps_the_lock_does(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), ExitStack() as held:
        assert not take(tmp_path / "lock", held, SystemClock())


def test_stop_requests_are_taken_once_whatever_they_say(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    monitor = StopRequests(path)
    assert list(monitor.poll()) == []
    for text, now in ((b'{"now": true}', True), (b'{"now": false}', False), (b"", False), (b"[]", False)):
        path.write_bytes(text)
        (event,) = monitor.poll()
        assert isinstance(event, StopRequested)
        assert (event.now, event.ending.exit_code) == (now, 143)
        assert list(monitor.poll()) == []
    request_stop(path, now=True)
    assert [event.now for event in monitor.poll() if isinstance(event, StopRequested)] == [True]


@dataclass
class Moody:
    """Fails three times, and then sees something."""

    name: str = "moody"
    every: float = 0.01
    polls: list[int] = field(default_factory=list)

    def poll(self) -> Iterable[Event]:
        self.polls.append(1)
        if len(self.polls) <= 3:
            raise KeyError("what")
        return (Woke(),)


def test_a_monitor_that_fails_is_told_of_once_and_looks_again() -> None:
    posted, leaving = Posted(), threading.Event()
    thread = watch(Moody(), posted.append, leaving)
    posted.wait(Woke)
    leaving.set()
    thread.join(5.0)
    assert len(posted.of(Noticed)) == 1
