"""A listing, page by page, beside what is here: what is right already, what is to be fetched, what cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterable

from runner.core.diff import Folder, Odd, Selection, Skip, Wanted, judging, why_fetch
from runner.dataset.fetch import AT_ONCE
from runner.dataset.leftovers import Parts
from runner.dataset.record import Entry, Record, looks_right
from runner.dataset.room import Need
from runner.dataset.source import LeftOut, Source
from runner.dataset.task import Recorded
from runner.dataset.worklist import Amount, Todo, Worklist, lane
from runner.errors import NotYetError
from runner.storage.api import ObjectInfo

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip")


class Comparison:
    """Compares pages with the record and with the disk, and keeps count. Used by the record's thread."""

    def __init__(self, source: Source, entry: Entry, record: Record, worklist: Worklist) -> None:
        self._judge = judging(source.prefix, Selection(source.include, source.exclude))
        self._source = source
        self._files = str(entry.files)
        self._record = record
        self._worklist = worklist
        self._parts = Parts(entry.parts)
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
        wanted = self._worklist.new(self._sorted_out(page))
        known = self._record.known([item.path for item in wanted])
        sizes: list[tuple[int, int]] = []
        self._worklist.add([(item, self._todo(item, known.get(item.path), sizes)) for item in wanted])
        self._count(sizes)

    def leave_out(self, odd: Iterable[Odd]) -> None:
        for one in odd:
            self.left_out = self.left_out.add(one)

    def still_needed(self) -> Need:
        """Room for what has not been handed out."""
        need = self._worklist.need(self._block)
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
        self._worklist.add_folders(folders)
        return wanted

    def _refuse_archive(self, key: str) -> None:
        if self._source.extract != "never" and key.lower().endswith(ARCHIVES):
            raise NotYetError(
                f"{self._source.url}: unpacking archives is not in this version yet ({key})",
                "`extract: never` brings them as they are",
            )

    def _todo(self, item: Wanted, known: Recorded | None, sizes: list[tuple[int, int]]) -> Todo | None:
        """What is to be done. Where that is to fetch it, its size and that of what it replaces join ``sizes``."""
        reason = why_fetch(item, known, intact=known is not None and looks_right(known, self._files))
        if not reason:
            self.to_check += self._source.verify
            return Todo.CHECK if self._source.verify else None
        sizes.append((item.size, known.size if known and reason == "changed" else 0))
        if item.size > AT_ONCE:
            self._parts.keep(item)
        return lane(item.size)

    def _count(self, sizes: list[tuple[int, int]]) -> None:
        """Of a page's files that are to be fetched: the size of each, and of what it replaces."""
        size, replaced = sum(new for new, _ in sizes), sum(old for _, old in sizes)
        blocks = sum(self._blocks(new) - self._blocks(old) for new, old in sizes)
        self.to_fetch += Amount(len(sizes), size)
        self.need += Need(size - replaced, blocks, sum(not old for _, old in sizes))

    def _blocks(self, size: int) -> int:
        return -(-size // self._block) * self._block
