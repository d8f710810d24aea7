"""One file at a time: fetched, checked, and put in its place, never anywhere else."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from runner.core.diff import Fetch
from runner.dataset.record import Entry, Recorded
from runner.dataset.source import Source
from runner.errors import CloudrunError, DataError, ExitCode, ObjectChanged, ObjectMissing
from runner.storage.local import translating

READ_AT_ONCE = 1 << 20


class SyncStopped(CloudrunError):
    """Asked to stop. What was fetched is kept: the same sync goes on from there."""

    exit_code = ExitCode.PREEMPTED


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds: size in bytes, modification time in nanoseconds, checksum as 8 hex digits."""

    size: int
    mtime_ns: int
    crc32c: str


def content_of(path: Path) -> Content:
    """Read the whole file."""
    size, checksum = 0, 0
    with open(path, "rb", 0) as file:
        # One byte more than the file, so that a small one takes one read and no large buffer.
        buffer = memoryview(bytearray(min(READ_AT_ONCE, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):
            size += count
            checksum = crc32c(buffer[:count], checksum)
        mtime_ns = os.fstat(file.fileno()).st_mtime_ns
    return Content(size, mtime_ns, f"{checksum:08x}")


class Meter:
    """Bytes that have arrived, over all files and threads. What a failed try brought does not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._total += count

    def total(self) -> int:
        return self._total


class FileMeter:
    """The share of one file in the meter: never more than its size, however often a store starts again."""

    def __init__(self, meter: Meter, size: int) -> None:
        self._meter = meter
        self._size = size
        self._counted = 0

    def move_to(self, count: int) -> None:
        count = min(count, self._size)
        self._meter.add(count - self._counted)
        self._counted = count

    def add(self, count: int) -> None:
        self.move_to(self._counted + count)


class Fetcher:
    """Brings objects of a source into an entry. Safe to use from several threads."""

    def __init__(self, source: Source, entry: Entry, stop: threading.Event) -> None:
        self._source = source
        self._files = entry.files
        self._parts = entry.parts
        self._stop = stop
        self._folders: set[Path] = set()
        self.meter = Meter()

    def fetch(self, item: Fetch, dropped: threading.Event) -> Recorded:
        """One file, in place. An object that is replaced meanwhile gets a second try, as what it is by then."""
        try:
            return self._bring(item, dropped)
        except ObjectChanged:
            return self._bring(self._listed_again(item), dropped)

    def remove(self, path: str) -> None:
        """Remove a file that we brought, and the folders that this leaves empty."""
        target = self._files / path
        if not self._is_inside(target.parent):
            return
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            target.unlink()
        with suppress(OSError):
            for folder in Path(path).parents[:-1]:
                (self._files / folder).rmdir()

    def make_folder(self, folder: Path) -> None:
        """Make a folder below ``files``. Raises DataError when something that is not ours is in the way."""
        if folder in self._folders:
            return
        if not self._is_inside(folder):
            raise DataError(f"{folder} leads out of the cache", "remove the symbolic link that somebody made there")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(f"{folder}: a file that cloudrun did not bring is in the way", "remove it") from error
        self._folders.add(folder)

    def _is_inside(self, folder: Path) -> bool:
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self._files))

    def _bring(self, item: Fetch, dropped: threading.Event) -> Recorded:
        part, target = self._parts / secrets.token_hex(8), self._files / item.path
        count = FileMeter(self.meter, item.size)

        def moved(size: int) -> None:
            if dropped.is_set() or self._stop.is_set():
                raise SyncStopped(f"stopped while fetching {item.key}")
            count.add(size)

        try:
            self._source.store.download(item.key, part, version=item.version, on_bytes=moved)
            with translating(str(target)):
                file = _recorded(item, content_of(part))
                self._publish(part, target)
        except BaseException:
            count.move_to(0)
            part.unlink(missing_ok=True)
            raise
        count.move_to(item.size)
        return file

    def _publish(self, part: Path, target: Path) -> None:
        self.make_folder(target.parent)
        try:
            os.replace(part, target)
        except IsADirectoryError as error:
            raise DataError(f"{target}: a folder that cloudrun did not make is in the way", "remove it") from error

    def _listed_again(self, item: Fetch) -> Fetch:
        now = next((info for info in self._source.store.list(item.key) if info.key == item.key), None)
        if now is None:
            raise ObjectMissing(f"{item.key} has vanished from {self._source.url}", "run again when it is at rest")
        return replace(item, size=now.size, version=now.version)


def _recorded(item: Fetch, content: Content) -> Recorded:
    if content.size != item.size:
        raise ObjectChanged(f"{item.key}: {content.size} bytes arrived where {item.size} were listed")
    return Recorded(item.path, item.key, item.size, item.version, content.mtime_ns, content.crc32c)
