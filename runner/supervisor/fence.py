"""The store as a session sees it: what it writes, it writes only while the job's lease is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, Sink, ignore_bytes
from runner.storage.passing import PassingStore
from runner.storage.retrying import Retry, write_surely
from runner.supervisor.lease import LeaseKeeper

_Result = TypeVar("_Result")


class FencedStore(PassingStore):
    """A store that asks the lease before each try of what commits or deletes.

    ``quick`` is the same store with little patience, so that nothing is written long after the lease was asked;
    ``retry`` is the patience for it all. Files that only wait for their commit do no harm: they go through ``store``
    while the lease is not known to be lost.
    """

    def __init__(self, store: ObjectStore, quick: ObjectStore, lease: LeaseKeeper, retry: Retry) -> None:
        super().__init__(store)
        self._quick = quick
        self._lease = lease
        self._retry = retry

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        def write() -> ObjectInfo:
            self._lease.check()
            return self._quick.write(key, data, only_new=only_new, replacing=replacing)

        if not only_new and replacing is None:
            return self._retry("write", write)
        # Here and not only below: what was written before the quick one lost its patience is ours as well.
        return write_surely(self._retry, self.inner, key, data, write)

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        self._lease.check_not_lost()
        return super().upload(source, key, on_bytes=on_bytes, sink=sink, note=note)

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        self._lease.check_not_lost()
        return super().copy(source, key, version=version)

    def delete(self, keys: Iterable[str]) -> None:
        doomed = tuple(keys)
        self._surely("delete", lambda: self._quick.delete(doomed))

    def sweep(self, prefix: str, before: float) -> None:
        self._surely("sweep", lambda: self._quick.sweep(prefix, before))

    def _surely(self, operation: str, call: Callable[[], _Result]) -> _Result:
        def attempt() -> _Result:
            self._lease.check()
            return call()

        return self._retry(operation, attempt)
