"""An object store in memory, with faults on demand: for simulations and tests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from runner.clock import Clock, SystemClock
from runner.errors import CloudrunError, ObjectChanged, ObjectExists, ObjectMissing
from runner.storage.api import (
    ObjectInfo,
    OnBytes,
    Sink,
    check_folder,
    check_key,
    check_prefix,
    check_size,
    ignore_bytes,
)
from runner.storage.local import reading, translating, write_all

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one call.

    ``delay`` seconds pass first. With ``error`` alone the call fails and nothing has happened. ``cut``: it fails
    after so many bytes of a transfer, or objects of a listing, have passed. ``landed``: the call has its full effect
    and only the answer is lost.
    """

    error: CloudrunError | None = None
    cut: int | None = None
    landed: bool = False
    delay: float = 0.0


FaultPlan = Callable[[str, str, int], Fault | None]
"""(operation, key, how many calls of this operation with this key there were before) -> what goes wrong.

Operations are the methods of :class:`ObjectStore`; the key of a list is its prefix, a delete asks once per key.
"""

NO_FAULT = Fault()


def no_faults(_operation: str, _key: str, _nth: int) -> Fault | None:
    """The plan of a store that always works."""
    return None


@dataclass(frozen=True, slots=True)
class _Entry:
    info: ObjectInfo
    data: bytes


class MemoryStore:
    """An :class:`ObjectStore` that forgets everything with the process.

    ``objects`` are there from the start, under any key, also one that could not be written. ``sleep`` takes seconds.
    """

    def __init__(
        self,
        faults: FaultPlan = no_faults,
        *,
        objects: Mapping[str, bytes] | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        url: str = "memory://",
    ) -> None:
        self._faults = faults
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._url = url
        self._lock = threading.Lock()
        self._calls = Counter[tuple[str, str]]()
        self._writes = 0
        self._entries: dict[str, _Entry] = {}
        for key, data in (objects or {}).items():
            self._put(key, data)

    @property
    def url(self) -> str:
        return self._url

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        fault = self._begin("list", prefix)
        with self._lock:
            found = [entry.info for key, entry in self._entries.items() if key.startswith(prefix)]
        yield from islice(found, fault.cut)
        _fail(fault)

    @property
    def exclusive(self) -> bool:
        return True

    def folders(self, prefix: str = "") -> Iterator[str]:
        check_folder(prefix)
        below = (info.key.removeprefix(prefix) for info in self.list(prefix))
        yield from sorted({key.partition("/")[0] for key in below if "/" in key})

    def read(self, key: str) -> bytes:
        return self.look(key)[0]

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        check_key(key)
        fault = self._begin("read", key)
        entry = self._get(key)
        _fail(fault)
        check_size(f"{self._url}/{key}", entry.info.size, at_most)
        return entry.data, entry.info.version

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        check_key(key)
        fault = self._begin("write", key)
        if fault.cut is not None:
            _fail(fault)
        info = self._put(key, bytes(data), only_new=only_new, replacing=replacing)
        _fail(fault)
        return info

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> int | None:
        check_key(key)
        fault = self._begin("download", key)
        entry = self._get(key)
        self._check_version(entry, version)
        with translating(str(target), room=(target.parent, len(entry.data))), open(target, "wb", 0) as file:
            for chunk in _chunks(entry.data, fault.cut):
                write_all(file.fileno(), chunk)
                on_bytes(len(chunk))
        _fail(fault)
        self._check_version(self._get(key), version)
        return None

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        check_key(key)
        fault = self._begin("upload", key)
        with reading(source) as file, open(file.fd, "rb", closefd=False) as stream:
            data = stream.read()
            if sink is not None:
                sink()(memoryview(data))
            for chunk in _chunks(data, fault.cut):
                on_bytes(len(chunk))
            file.check()
        if fault.cut is not None:
            _fail(fault)
        info = self._put(key, data)
        _fail(fault)
        return info

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        check_key(source)
        check_key(key)
        fault = self._begin("copy", source)
        entry = self._get(source)
        self._check_version(entry, version)
        info = self._put(key, entry.data)
        _fail(fault)
        return info

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_key(key)
            fault = self._begin("delete", key)
            with self._lock:
                self._entries.pop(key, None)
            _fail(fault)

    def sweep(self, prefix: str, before: float) -> None:
        """Nothing is ever unfinished here."""
        check_folder(prefix)

    def _begin(self, operation: str, key: str) -> Fault:
        """Ask the plan, wait, and fail where nothing is to happen first."""
        with self._lock:
            nth = self._calls[operation, key]
            self._calls[operation, key] += 1
        fault = self._faults(operation, key, nth) or NO_FAULT
        if fault.delay:
            self._sleep(fault.delay)
        if not fault.landed and fault.cut is None:
            _fail(fault)
        return fault

    def _get(self, key: str) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise ObjectMissing(f"{self._url}/{key} does not exist")
        return entry

    def _put(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        with self._lock:
            if replacing is not None and key not in self._entries:
                raise ObjectMissing(f"{self._url}/{key} does not exist")
            if replacing not in (None, key in self._entries and self._entries[key].info.version):
                raise ObjectChanged(f"{self._url}/{key} is not the version that was asked for")
            if only_new and key in self._entries:
                raise ObjectExists(f"{self._url}/{key} exists")
            self._writes += 1
            info = ObjectInfo(key, len(data), str(self._writes), self._clock.now())
            self._entries[key] = _Entry(info, data)
        return info

    def _check_version(self, entry: _Entry, version: str | None) -> None:
        if version not in (None, entry.info.version):
            raise ObjectChanged(f"{self._url}/{entry.info.key} is not the version that was asked for")


def _fail(fault: Fault) -> None:
    if fault.error is not None:
        raise fault.error


def _chunks(data: bytes, cut: int | None) -> Iterator[bytes]:
    end = len(data) if cut is None else min(cut, len(data))
    for start in range(0, end, CHUNK):
        yield data[start : min(start + CHUNK, end)]
