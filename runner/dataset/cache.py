"""The local copies of datasets: shared by jobs and processes, thrown away when room is needed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.clock import Clock, SystemClock
from runner.dataset.fetch import SyncStopped
from runner.dataset.folding import folding_of
from runner.dataset.listing import Listing, Need
from runner.dataset.record import Entry, Header, Record, RecordLost, forget, recording
from runner.dataset.source import Source
from runner.dataset.sync import Dataset, Report, Sync, SyncProgress
from runner.errors import DataError, DiskFull
from runner.files import is_locked, locked, make_directory
from runner.storage.local import free_bytes, no_room, translating
from runner.units import format_size

RESERVE = 1 << 30
"""Bytes that the cache leaves free on any disk, or a hundredth of a small one."""

POLL = 0.2
"""Seconds between two looks at a lock that another process holds."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One dataset in the cache. Sizes in bytes of content; ``last_used`` in epoch seconds, 0 for never."""

    source: str
    path: Path
    bytes: int
    files: int
    complete: bool
    in_use: bool
    last_used: float


@dataclass(frozen=True, slots=True)
class Cleared:
    """What :meth:`DataCache.clear` removed, and what it left because somebody uses it."""

    removed: tuple[CacheEntry, ...]
    in_use: tuple[CacheEntry, ...]


def ignore_progress(_progress: SyncProgress) -> None:
    """The listener of callers that do not show progress."""


def entry_name(source: Source) -> str:
    """A readable, unique and stable folder name for what ``source`` selects."""
    url = source.url.rstrip("/")
    identity = json.dumps([url, source.include, source.exclude]).encode()
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("/")[2])[:40].strip(".-") or "data"
    return f"{readable}-{hashlib.sha256(identity).hexdigest()[:12]}"


class DataCache:
    """Datasets below ``root``; at most ``limit`` bytes of them when it is given.

    Any number of processes may use one cache: each entry is filled by one at a time, and never evicted while a process
    fills or uses it. ``commit_every`` is the number of seconds after which fetched files are put on record.
    """

    def __init__(
        self, root: Path, limit: int | None = None, *, clock: Clock | None = None, commit_every: float = 2.0
    ) -> None:
        self._root = Path(os.path.abspath(root))
        self._data = self._root / "data"
        self._limit = limit
        self._clock = clock or SystemClock()
        self._commit_every = commit_every

    def sync(
        self,
        source: Source,
        *,
        workers: int = 8,
        report: Report = ignore_progress,
        stop: threading.Event | None = None,
    ) -> Dataset:
        """Make the local copy of ``source`` complete; does no more than list where it is. See :meth:`Sync.run`."""
        stop = stop or threading.Event()
        entry = Entry(self._data / entry_name(source))
        with self._filling(entry, source, report, stop):
            entry.sweep()
            try:
                dataset = self._fill(source, entry, workers, report, stop)
            except RecordLost:
                forget(entry)
                dataset = self._fill(source, entry, workers, report, stop)
            entry.touch()
        return dataset

    def _fill(self, source: Source, entry: Entry, workers: int, report: Report, stop: threading.Event) -> Dataset:
        header = Header(source.url, source.include, source.exclude)
        with (
            translating(str(entry.folder)),
            recording(entry),
            Record(entry, header) as record,
            Listing(record, entry, folding_of(entry.folder)) as listing,
        ):
            return Sync(
                source,
                entry,
                record,
                listing,
                _EntryRoom(self),
                clock=self._clock,
                report=report,
                stop=stop,
                workers=workers,
                commit_every=self._commit_every,
            ).run()

    @contextmanager
    def use(self, dataset: Dataset) -> Iterator[Path]:
        """Keep ``dataset`` from being evicted while the block runs. Raises DataError when it has gone already."""
        entry = Entry(dataset.path.parent)
        with ExitStack() as held:
            with self._locking():
                if not entry.is_complete():
                    raise DataError(f"{entry.folder} is not complete any more", "sync it again")
                held.enter_context(locked(entry.in_use, shared=True))
            entry.touch()
            yield dataset.path
            entry.touch()

    def entries(self) -> list[CacheEntry]:
        """Everything in the cache, complete or not, the least recently used first."""
        return sorted((self._describe(entry) for entry in self._all()), key=lambda entry: entry.last_used)

    def clear(self, names: Collection[str] | None = None) -> Cleared:
        """Remove entries by folder name or source URL; all when ``names`` is None. Those in use stay."""
        entries = self.entries()
        chosen = [entry for entry in entries if names is None or {entry.path.name, entry.source} & set(names)]
        unknown = set(names or ()) - {name for entry in chosen for name in (entry.path.name, entry.source)}
        if unknown:
            there = ", ".join(entry.path.name for entry in entries) or "nothing"
            raise DataError(f"not in the cache: {', '.join(sorted(unknown))}", f"there is: {there}")
        removed = tuple(entry for entry in chosen if self._evict(Entry(entry.path)))
        return Cleared(removed, tuple(entry for entry in chosen if entry not in removed))

    def make_room(self, bytes_needed: int) -> int:
        """Evict the least recently used entries that nobody uses until so many bytes fit; returns the bytes freed.

        Frees what it can also when that is not enough.
        """
        return self._evict_until(lambda: min(self._free(), self._left_of_limit()) >= bytes_needed)

    # Room

    def room(self) -> Need:
        """What may be written without evicting anything."""
        on_disk, numbers = self._free(), os.statvfs(self._data)
        return Need(self._left_of_limit(), on_disk, numbers.f_favail if numbers.f_files else 1 << 62)

    def make_space(self, need: Need) -> None:
        """Evict if that helps; raise DiskFull, with nothing evicted, if it would not."""
        evictable = sum(entry.bytes for entry in self.entries() if not entry.in_use)
        if self._has_room(need, after_freeing=evictable):
            self._evict_until(lambda: self._has_room(need))
        if self._left_of_limit() < need.bytes:
            where = f"within the limit of {format_size(self._limit or 0)} of {self._root}"
            raise no_room(where, need.bytes, self._left_of_limit(), "raise `cache.limit` or select less with `include`")
        if self._free() < need.on_disk:
            hint = "free some space, use a larger disk for `cache.dir`, or select less with `include`"
            raise no_room(f"on {self._root}", need.on_disk, self._free(), hint)
        possible = self.room().files
        if possible < need.files:
            raise DiskFull(f"no room: needs {need.files} files, {possible} more are possible on {self._root}")

    def _has_room(self, need: Need, after_freeing: int = 0) -> bool:
        on_disk, within_limit = self._free() + after_freeing, self._left_of_limit() + after_freeing
        return need.on_disk <= on_disk and need.bytes <= within_limit

    def _evict_until(self, enough: Callable[[], bool]) -> int:
        freed = 0
        for entry in self.entries():
            if enough():
                break
            if not entry.in_use and self._evict(Entry(entry.path)):
                freed += entry.bytes
        return freed

    def _free(self) -> int:
        """Bytes that may be written to the disk."""
        make_directory(self._data)
        numbers = os.statvfs(self._data)
        return max(0, free_bytes(self._data) - min(RESERVE, numbers.f_blocks * numbers.f_frsize // 100))

    def _left_of_limit(self) -> int:
        if self._limit is None:
            return 1 << 62
        return max(0, self._limit - sum(entry.bytes for entry in self.entries()))

    # Entries and their locks

    def _all(self) -> list[Entry]:
        if not self._data.is_dir():
            return []
        with os.scandir(self._data) as found:
            return [Entry(Path(item.path)) for item in found if item.is_dir() and not item.name.startswith(".")]

    def _describe(self, entry: Entry) -> CacheEntry:
        header = entry.header()
        return CacheEntry(
            header.source,
            entry.folder,
            header.bytes,
            header.files,
            header.completed_at is not None,
            self._is_busy(entry),
            entry.last_used(),
        )

    def _is_busy(self, entry: Entry) -> bool:
        with self._locking():
            return is_locked(entry.in_use) or is_locked(entry.lock)

    @contextmanager
    def _locking(self) -> Iterator[None]:
        """Held for moments only, while a lock of an entry is taken: an entry cannot vanish between the finding of
        its lock file and the locking of it.
        """
        with translating(str(self._root)), locked(self._data / ".lock"):
            yield

    @contextmanager
    def _filling(self, entry: Entry, source: Source, report: Report, stop: threading.Event) -> Iterator[None]:
        """Hold the entry's lock; while another process does, wait and say so."""
        with ExitStack() as held:
            while not self._take(entry, held):
                report(SyncProgress("waiting", message=f"another process is bringing {source.url} already"))
                if stop.wait(POLL):
                    raise SyncStopped(f"stopped while another process was bringing {source.url}")
            yield

    def _take(self, entry: Entry, held: ExitStack) -> bool:
        with self._locking():
            try:
                held.enter_context(locked(entry.lock, wait=False))
            except BlockingIOError:
                return False
        self._sweep()
        return True

    def _evict(self, entry: Entry) -> bool:
        """Remove the entry unless somebody fills or uses it."""
        doomed = self._data / f".trash-{secrets.token_hex(8)}"
        with self._locking():
            if not entry.folder.is_dir():
                return False
            try:
                with locked(entry.lock, wait=False), locked(entry.in_use, wait=False):
                    os.rename(entry.folder, doomed)
            except BlockingIOError:
                return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _sweep(self) -> None:
        """Finish what a dead process was about to throw away."""
        for doomed in self._data.glob(".trash-*"):
            shutil.rmtree(doomed, ignore_errors=True)


class _EntryRoom:
    """The room of a cache while one entry is filled; measured when it is first asked for."""

    def __init__(self, cache: DataCache) -> None:
        self._cache = cache
        self._at_first: Need | None = None

    def fits(self, need: Need) -> bool:
        if self._at_first is None:
            self._at_first = self._cache.room()
        return need.fits(self._at_first)

    def make(self, need: Need) -> None:
        self._cache.make_space(need)
