"""Several machines and one store: each has a line to it of its own, which can be cut."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from runner.clock import SystemClock
from runner.core.events import LeaseTaken
from runner.errors import StoreUnreachable
from runner.storage.api import ObjectInfo, ObjectStore
from runner.storage.passing import PassingStore
from runner.storage.retrying import Retry
from runner.supervisor.lease import LeaseKeeper, LeasePlace
from runner.supervisor.lease_body import Body, Waiter, parse_body
from tests.supervisor.sessions import Posted

KEY = "job/lease.json"


class Line(PassingStore):
    """The store as one machine sees it. While it is ``cut`` nothing answers; while it ``hangs`` nothing even fails."""

    def __init__(self, store: ObjectStore, *, exclusive: bool = True) -> None:
        super().__init__(store)
        self._exclusive = exclusive
        self.cut = False
        self.open = threading.Event()
        self.open.set()
        self.writes: list[str] = []

    @property
    def exclusive(self) -> bool:
        return self._exclusive

    @property
    def inner(self) -> ObjectStore:
        self.open.wait()
        if self.cut:
            raise StoreUnreachable("the line is cut")
        return super().inner

    @property
    def url(self) -> str:
        return self._inner.url

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        self.writes.append(key)
        return super().write(key, data, only_new=only_new, replacing=replacing)


@dataclass
class Machine:
    """One supervisor's part in the lease. ``disk`` outlives it."""

    store: ObjectStore
    disk: Path
    name: str
    period: float = 1.0
    session: str = ""
    may_begin: bool = True
    exclusive: bool = True
    posted: Posted = field(default_factory=Posted)

    def __post_init__(self) -> None:
        self.line = Line(self.store, exclusive=self.exclusive)
        me = Waiter(self.session or f"session of {self.name}", self.name)
        self.keeper = LeaseKeeper(
            LeasePlace(self.line, KEY, me, self.period),
            self.disk / f"{self.name}.json",
            post=self.posted.append,
            clock=SystemClock(),
            first=Retry(0.5),
            may_begin=self.may_begin,
        )

    def take(self) -> Machine:
        self.keeper.take()
        return self

    def die(self) -> None:
        """Nothing of it reaches the store any more."""
        self.line.cut = True

    def has_it(self) -> bool:
        return bool(self.posted.of(LeaseTaken))


def written(store: ObjectStore) -> Body:
    return parse_body(store.read(KEY))
