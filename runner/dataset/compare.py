"""A listing, page by page, beside what is here: what is right already, what is to be fetched, what cannot be."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from runner.core.diff import Folder, Odd, Selection, Skip, Wanted, judging, why_fetch
from runner.dataset.fetch import AT_ONCE, note_name, part_name
from runner.dataset.listing import Amount, Listing, Need, Todo, lane
from runner.dataset.record import Entry, Record
from runner.dataset.source import LeftOut, Source, objects_of
from runner.dataset.task import Recorded
from runner.errors import NotYetError
from runner.storage.api import ObjectInfo

PAGE = 1000
"""Objects that are compared at a time."""

PAGES_AHEAD = 4
"""Pages that may wait to be compared."""

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip")


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects of the source."""

    objects: list[ObjectInfo]


@dataclass(frozen=True, slots=True)
class ListingEnded:
    """The listing is complete, or was broken off by ``error``."""

    error: Exception | None


class Lister:
    """A thread that lists a source and posts its pages; never more than a few ahead of those that were released."""

    def __init__(self, source: Source, post: Callable[[Page | ListingEnded], None]) -> None:
        self._source = source
        self._post = post
        self._slots = threading.Semaphore(PAGES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="list")
        self._thread.start()

    def release(self) -> None:
        """One page has been compared."""
        self._slots.release()

    def close(self) -> None:
        """End the thread, also in the middle."""
        self._closed.set()
        self._slots.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._list()
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a value
            self._post(ListingEnded(error))
        else:
            self._post(ListingEnded(None))

    def _list(self) -> None:
        objects = self._until_closed(objects_of(self._source))
        while page := list(islice(objects, PAGE)):
            self._slots.acquire()
            self._post(Page(page))

    def _until_closed(self, objects: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        for info in objects:
            if self._closed.is_set():
                return
            yield info


class Comparison:
    """Compares pages with the record and with the disk, and keeps count. Used by the record's thread."""

    def __init__(self, source: Source, entry: Entry, record: Record, listing: Listing) -> None:
        self._judge = judging(source.prefix, Selection(source.include, source.exclude))
        self._source = source
        self._files = str(entry.files)
        self._record = record
        self._listing = listing
        self._parts = _Parts(entry.parts)
        self._block = os.statvfs(entry.folder).f_frsize
        self.objects = 0
        self.unselected = 0
        self.to_check = 0
        self.to_fetch = Amount()
        self.need = Need()
        self.left_out = LeftOut()

    def add(self, page: list[ObjectInfo]) -> None:
        """Raises NotYetError for an archive that would have to be unpacked."""
        self.objects += len(page)
        wanted, odd = self._listing.sift(self._listing.new(self._sorted_out(page)))
        self.leave_out(odd)
        known = self._record.known([item.path for item in wanted])
        self._listing.add([(item, self._todo(item, known.get(item.path))) for item in wanted])

    def leave_out(self, odd: Iterable[Odd]) -> None:
        for one in odd:
            self.left_out = self.left_out.add(one)

    def still_needed(self) -> Need:
        """Room for what has not been handed out."""
        need = self._listing.need(self._block)
        return Need(need.bytes, need.on_disk - self._parts.on_disk, need.files)

    def remove_useless_parts(self) -> None:
        """Once the listing is complete: parts of what nobody wants any more."""
        self._parts.remove_useless()

    def _sorted_out(self, page: list[ObjectInfo]) -> list[Wanted]:
        wanted, folders = [], []
        for info in page:
            verdict = self._judge(info)
            if isinstance(verdict, Wanted):
                self._refuse_archive(verdict.key)
                wanted.append(verdict)
            elif isinstance(verdict, Folder):
                folders.append(verdict.path)
            elif isinstance(verdict, Odd):
                self.leave_out([verdict])
            elif isinstance(verdict, Skip):
                self.unselected += verdict.reason in ("excluded", "not included")
        self._listing.add_folders(folders)
        return wanted

    def _refuse_archive(self, key: str) -> None:
        if self._source.extract != "never" and key.lower().endswith(ARCHIVES):
            raise NotYetError(
                f"{self._source.url}: unpacking archives is not in this version yet ({key})",
                "`extract: never` brings them as they are",
            )

    def _todo(self, item: Wanted, known: Recorded | None) -> Todo | None:
        reason = why_fetch(item, known, intact=known is not None and looks_right(known, self._files))
        if not reason:
            self.to_check += self._source.verify
            return Todo.CHECK if self._source.verify else None
        self._count(item, known.size if known and reason == "changed" else 0)
        self._parts.keep(item)
        return lane(item.size)

    def _count(self, item: Wanted, replaced: int) -> None:
        blocks = self._blocks(item.size)
        self.to_fetch += Amount(1, item.size)
        self.need += Need(item.size - replaced, blocks - self._blocks(replaced), 0 if replaced else 1)

    def _blocks(self, size: int) -> int:
        return -(-size // self._block) * self._block


class _Parts:
    """What an earlier sync left in ``parts``. ``on_disk`` counts the bytes of what is still of use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._useless: set[str] = set(os.listdir(folder)) if folder.is_dir() else set()
        self.on_disk = 0

    def keep(self, item: Wanted) -> None:
        """A part of this very version may be gone on with."""
        part = part_name(item) if self._useless and item.size > AT_ONCE else ""
        if note_name(part) in self._useless and part in self._useless:
            self._useless -= {part, note_name(part)}
            self.on_disk += (self._folder / part).stat().st_blocks * 512

    def remove_useless(self) -> None:
        for name in self._useless:
            with suppress(FileNotFoundError):
                (self._folder / name).unlink()
        self._useless = set()


def looks_right(file: Recorded, folder: str) -> bool:
    """Whether the file below ``folder`` has the size and the time that it was given when it was written."""
    try:
        info = os.lstat(f"{folder}/{file.path}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns)
