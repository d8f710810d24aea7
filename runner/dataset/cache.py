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
from runner.dataset.record import Entry, Header, NoRoomForRecord, Record, RecordLost, forget, recording
from runner.dataset.room import EntryRoom, Need, Space, footprint
from runner.dataset.source import Source
from runner.dataset.sync import Dataset, Report, Sync, SyncProgress
from runner.dataset.worklist import Worklist
from runner.errors import DataError
from runner.files import is_locked, locked
from runner.storage.local import translating

ROOM_FOR_RECORD = 16 << 20
"""Bytes that should be free for the record and the listing."""

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
        self._space = Space(self._root, limit, self._all, self._is_filled)
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
        """Make the local copy of ``source`` complete; does no more than list where it is. See :meth:`Sync.run`.

        Where it fails before anything came, no entry is left.
        """
        entry = Entry(self._data / entry_name(source))
        try:
            return self._bring(source, entry, workers, report, stop or threading.Event())
        except BaseException:
            self._evict(entry, when=Entry.is_void)
            raise

    def _bring(self, source: Source, entry: Entry, workers: int, report: Report, stop: threading.Event) -> Dataset:
        with self._filling(entry, source, report, stop):
            entry.refuse_links()
            try:
                dataset = self._fill(source, entry, workers, report, stop)
            except RecordLost:
                forget(entry)
                dataset = self._fill(source, entry, workers, report, stop)
            except NoRoomForRecord:
                if not self._evict_until(lambda: self._space.free() >= ROOM_FOR_RECORD):
                    raise
                dataset = self._fill(source, entry, workers, report, stop)
            entry.touch()
        return dataset

    def _fill(self, source: Source, entry: Entry, workers: int, report: Report, stop: threading.Event) -> Dataset:
        header = Header(source.url, source.include, source.exclude)
        entry.sweep()
        with (
            recording(entry),
            Record(entry, header) as record,
            Worklist(record, entry, folding_of(entry.folder)) as worklist,
            EntryRoom(self._space, entry, self._make_space) as room,
        ):
            return Sync(
                source,
                entry,
                record,
                worklist,
                room,
                clock=self._clock,
                report=report,
                stop=stop,
                workers=workers,
                commit_every=self._commit_every,
            ).run()

    @contextmanager
    def use(self, dataset: Dataset, *, stop: threading.Event | None = None) -> Iterator[Path]:
        """Keep ``dataset`` from being evicted while the block runs. When another process has begun to bring it up to
        date, waits for that; raises SyncStopped when told to ``stop`` meanwhile, DataError when it has gone.
        """
        entry, stop = Entry(dataset.path.parent), stop or threading.Event()
        with ExitStack() as held:
            while not self._hold(entry, held):
                if stop.wait(POLL):
                    raise SyncStopped(f"stopped while another process was changing {entry.folder}")
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
        """Evict the least recently used entries that nobody uses until so many bytes fit; returns the bytes of the disk
        that this has freed.

        Frees what it can also when that is not enough.
        """
        return self._evict_until(lambda: min(self._space.free(), self._space.left_of_limit()) >= bytes_needed)

    def _make_space(self, need: Need, entry: Entry) -> None:
        """Evict the least recently used entries until it fits; raise DiskFull, with nothing evicted, if it would not
        fit without all of them either.
        """
        room = self._space.beside(entry)
        if not need.fits(room):
            evictable = (footprint(Entry(one.path)) for one in self.entries() if not one.in_use)
            if not need.fits(sum(evictable, room)):
                raise self._space.too_small(need, room)
            self._evict_until(lambda: need.fits(self._space.beside(entry)))
        claimed, room = self._space.claim(entry, entry.header().bytes, need.bytes), self._space.beside(entry)
        if not claimed or not need.fits(room):
            raise self._space.too_small(need, room)

    def _evict_until(self, enough: Callable[[], bool]) -> int:
        """Bytes of the disk that this has given back."""
        freed = 0
        for one in self.entries():
            if enough():
                break
            size = 0 if one.in_use else footprint(Entry(one.path)).on_disk
            if not one.in_use and self._evict(Entry(one.path)):
                freed += size
        return freed

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

    def _is_filled(self, entry: Entry) -> bool:
        with self._locking():
            return is_locked(entry.lock)

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

    def _hold(self, entry: Entry, held: ExitStack) -> bool:
        """Mark a complete entry as used; False when it is being filled."""
        with self._locking():
            if entry.is_complete():
                held.enter_context(locked(entry.in_use, shared=True))
                return True
            if not is_locked(entry.lock):
                raise DataError(f"{entry.folder} is not complete any more", "sync it again")
        return False

    def _take(self, entry: Entry, held: ExitStack) -> bool:
        with self._locking():
            try:
                held.enter_context(locked(entry.lock, wait=False))
            except BlockingIOError:
                return False
        self._sweep()
        return True

    def _evict(self, entry: Entry, *, when: Callable[[Entry], bool] = Entry.exists) -> bool:
        """Remove the entry, if it is there and ``when`` holds, unless somebody fills or uses it."""
        doomed = self._data / f".trash-{secrets.token_hex(8)}"
        with self._locking():
            if not entry.exists():
                return False
            try:
                with locked(entry.lock, wait=False), locked(entry.in_use, wait=False):
                    if not when(entry):
                        return False
                    os.rename(entry.folder, doomed)
            except BlockingIOError:
                return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _sweep(self) -> None:
        """Finish what a dead process was about to throw away."""
        for doomed in self._data.glob(".trash-*"):
            shutil.rmtree(doomed, ignore_errors=True)
