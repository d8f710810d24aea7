"""How much may be written into the data cache: what its disk has left, and its limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from runner.dataset.record import Entry
from runner.errors import DiskFull
from runner.files import locked, make_directory
from runner.storage.local import free_bytes, no_room
from runner.units import format_size

RESERVE = 1 << 30
"""Bytes that the cache leaves free on any disk, or a hundredth of a small one."""

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Need:
    """Room for what is to be written: bytes of content, bytes of whole blocks on the disk, number of files."""

    bytes: int = 0
    on_disk: int = 0
    files: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(self.bytes + other.bytes, self.on_disk + other.on_disk, self.files + other.files)

    def fits(self, room: Need) -> bool:
        return self.bytes <= room.bytes and self.on_disk <= room.on_disk and self.files <= room.files


class Room(Protocol):
    """The room that a cache has for one entry."""

    def fits(self, need: Need) -> bool:
        """Whether there was so much when the sync began. Cheap; evicts nothing."""
        ...

    def make(self, need: Need) -> None:
        """Evict others if that helps; raise DiskFull, with nothing evicted, if it would not."""
        ...


class Space:
    """The disk and the limit of one cache.

    ``entries`` tells what is in it, ``is_filled`` whether somebody is filling an entry.
    """

    def __init__(
        self,
        root: Path,
        limit: int | None,
        entries: Callable[[], list[Entry]],
        is_filled: Callable[[Entry], bool],
    ) -> None:
        self._root = root
        self._data = root / "data"
        self._limit = limit
        self._entries = entries
        self._is_filled = is_filled

    def free(self) -> int:
        """Bytes that may be written to the disk."""
        make_directory(self._data)
        numbers = os.statvfs(self._data)
        return max(0, free_bytes(self._data) - min(RESERVE, numbers.f_blocks * numbers.f_frsize // 100))

    def left_of_limit(self) -> int:
        """Bytes of content that may be added to what is there."""
        if self._limit is None:
            return UNLIMITED
        return max(0, self._limit - sum(entry.header().bytes for entry in self._entries()))

    def beside(self, entry: Entry) -> Need:
        """What may be written into an entry that is being filled without evicting any other."""
        on_disk, numbers = self.free(), os.statvfs(self._data)
        files = numbers.f_favail if numbers.f_files else UNLIMITED
        return Need(self._left_by_others(entry, entry.header().bytes), on_disk, files)

    def claim(self, entry: Entry, held: int, more: int) -> bool:
        """Tell others that an entry is going to hold so many bytes ``more`` than the ``held`` ones.

        False when the limit does not allow it.
        """
        if self._limit is None:
            return True
        with locked(self._data / ".claims"):
            if more > self._left_by_others(entry, held):
                return False
            entry.claim.write_text(str(held + more))
        return True

    def too_small(self, need: Need, room: Need) -> DiskFull:
        """The error for a need that is larger than the room."""
        if room.bytes < need.bytes:
            where = f"within the limit of {format_size(self._limit or 0)} of {self._root}"
            return no_room(where, need.bytes, room.bytes, "raise `cache.limit` or select less with `include`")
        if room.on_disk < need.on_disk:
            hint = "free some space, use a larger disk for `cache.dir`, or select less with `include`"
            return no_room(f"on {self._root}", need.on_disk, room.on_disk, hint)
        return DiskFull(f"no room: needs {need.files} files, {room.files} more are possible on {self._root}")

    def _left_by_others(self, entry: Entry, held: int) -> int:
        """Bytes of the limit beyond what this entry holds, and what the others hold or claim."""
        if self._limit is None:
            return UNLIMITED
        others = sum(self._promised(one) for one in self._entries() if one.folder != entry.folder)
        return max(0, self._limit - others - held)

    def _promised(self, entry: Entry) -> int:
        return max(entry.header().bytes, entry.claimed() if self._is_filled(entry) else 0)


def footprint(entry: Entry) -> Need:
    """What is there to be won by evicting an entry: also its parts, and all of each file's blocks."""
    on_disk = files = 0
    for folder, _, names in os.walk(entry.folder):
        for path in (folder, *(f"{folder}/{name}" for name in names)):
            with suppress(FileNotFoundError):
                on_disk += os.lstat(path).st_blocks * 512
                files += 1
    return Need(entry.header().bytes, on_disk, files)


class EntryRoom:
    """The room for one entry while it is filled, measured when it is first asked for. What the entry needs is claimed,
    so that several that are filled at once do not exceed the limit together. ``make`` evicts others.
    """

    def __init__(self, space: Space, entry: Entry, make: Callable[[Need, Entry], None]) -> None:
        self._space = space
        self._entry = entry
        self._make = make
        self._held = entry.header().bytes
        self._at_first: Need | None = None
        self._claimed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entry.claim.unlink(missing_ok=True)

    def fits(self, need: Need) -> bool:
        if self._at_first is None:
            self._at_first = self._space.beside(self._entry)
        return need.fits(self._at_first) and self._may_claim(need.bytes)

    def make(self, need: Need) -> None:
        self._make(need, self._entry)

    def _may_claim(self, size: int) -> bool:
        if size > self._claimed:
            if not self._space.claim(self._entry, self._held, size):
                return False
            self._claimed = size
        return True
