"""What the outside wants of the training: a save soon, or an end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import FrameType

from runner.training.channel import Channel

_LOOK_EVERY_S = 1.0


class Urgency(IntEnum):
    """How much a save is wanted; the most urgent wish of all ranks counts."""

    NONE = 0
    CADENCE = 1
    ASKED = 2
    STOP = 3


class Wishes:
    """Requests from the supervisor, from ``CLOUDRUN_STOP_FILE``, and from signals.

    A signal that the script handles itself is left to it, and so are all of them outside the main thread, where Python
    cannot set handlers.
    """

    def __init__(self, channel: Channel | None, signals: Sequence[signal.Signals]) -> None:
        self._channel = channel
        self._stop_file = os.environ.get("CLOUDRUN_STOP_FILE", "")
        self._stop = False
        self._next_look = 0.0
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._on_signal)

    def urgency(self, now: float) -> Urgency:
        """The most urgent wish at the monotonic time ``now``."""
        if now >= self._next_look and self._stop_file:
            self._next_look = now + _LOOK_EVERY_S
            self._stop = self._stop or Path(self._stop_file).exists()
        if self._stop or (self._channel is not None and self._channel.stop):
            return Urgency.STOP
        if self._channel is None or not self._channel.asked:
            return Urgency.NONE
        return Urgency.ASKED if self._channel.urgent else Urgency.CADENCE

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop = True
        if os.getpid() != self._process:  # a fork of the training, which nobody would ask whether it wants to stop
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
