"""Requests that other processes of this machine leave as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from runner.core.events import Event, StopRequested
from runner.core.state import Ending
from runner.errors import ExitCode
from runner.files import write_atomically


def request_stop(path: Path, *, now: bool) -> None:
    """Leave a stop request for the supervisor that watches ``path``."""
    write_atomically(path, json.dumps({"now": now}).encode())


class StopRequests:
    """Turns a stop request file into an event, and removes it."""

    name = "stop request"
    every = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Iterable[Event]:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        self._path.unlink(missing_ok=True)
        ending = Ending("stopped", ExitCode.STOPPED, "stopped by cloudrun stop")
        return (StopRequested(ending, now=asks_for_now(text)),)


def asks_for_now(text: bytes) -> bool:
    """Anything unreadable is a plain stop request."""
    try:
        request = json.loads(text)
    except ValueError:
        return False
    return isinstance(request, dict) and request.get("now") is True
