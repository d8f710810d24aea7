"""For trainers that save in their own way: what the supervisor wants, and what it is told."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from runner.training.channel import Channel
from runner.training.ranks import Ranks, this_process
from runner.training.wishes import Urgency, Wishes

_TELL_EVERY_S = 1.0


class Following:
    """One rank's side of the talk. With several ranks, each makes one and calls its methods at the same points."""

    def __init__(self) -> None:
        self.ranks: Ranks = this_process()
        self._channel = Channel.connect(self.ranks.rank, self.ranks.world)
        self._wishes = Wishes(self._channel, ())
        self._last_told = 0.0
        self._stopping = False

    def step(self, step: int, total: int | None, loss: float | None) -> Urgency:
        """Tell the progress; what is wanted now, the same on every rank. STOP is said once: a save, then the end."""
        now = time.monotonic()
        if self._channel is not None and now - self._last_told >= _TELL_EVERY_S:
            self._last_told = now
            self._channel.progress(step, total, loss)
        urgency = Urgency(self.ranks.highest(self._wishes.urgency(now))[0])
        if urgency == Urgency.STOP and self._stopping:
            return Urgency.NONE
        self._stopping = self._stopping or urgency == Urgency.STOP
        return urgency

    def saved(self, path: str, step: int, seconds: float) -> None:
        """Every rank has written its part of the checkpoint at ``path``: nothing of it will change any more."""
        self.ranks.highest(step)
        if self._channel is None:
            return
        self._channel.save_made()
        if self.ranks.rank == 0:
            self._channel.saved(path, step, seconds, {})

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class Stopwatch:
    """``with Stopwatch() as watch: ...``, then ``watch.seconds``."""

    seconds = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._began
