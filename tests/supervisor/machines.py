"""Several machines and one store: each has a line to it of its own, which can be cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runner.clock import SystemClock
from runner.core.events import LeaseTaken
from runner.errors import StoreUnreachable
from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, Sink, ignore_bytes
from runner.storage.retrying import Retry
from runner.supervisor.lease import LeaseKeeper, LeasePlace
from runner.supervisor.lease_body import Body, Waiter, parse_body
from tests.supervisor.sessions import Posted

KEY = "job/lease.json"


class Line:
    """The store as one machine sees it. While it is ``cut`` nothing answers; while it ``hangs`` nothing even fails."""

    def __init__(self, store: ObjectStore, *, exclusive: bool = True) -> None:
        self.store = store
        self.exclusive = exclusive
        self.cut = False
        self.open = threading.Event()
        self.open.set()
        self.writes: list[str] = []

    @property
    def url(self) -> str:
        return self.store.url

    def there(self) -> ObjectStore:
        self.open.wait()
        if self.cut:
            raise StoreUnreachable("the line is cut")
        return self.store

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.there().list(prefix)

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self.there().folders(prefix)

    def read(self, key: str) -> bytes:
        return self.there().read(key)

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        return self.there().look(key, at_most=at_most)

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        self.writes.append(key)
        return self.there().write(key, data, only_new=only_new, replacing=replacing)

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> None:
        self.there().download(key, target, version=version, on_bytes=on_bytes, note=note)

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        return self.there().upload(source, key, on_bytes=on_bytes, sink=sink, note=note)

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        return self.there().copy(source, key, version=version)

    def delete(self, keys: Iterable[str]) -> None:
        self.there().delete(keys)

    def sweep(self, prefix: str, before: float) -> None:
        self.there().sweep(prefix, before)


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
