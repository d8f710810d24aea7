"""One file at a time: fetched, checked, and put in its place, never anywhere else."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from crc32c import crc32c

from runner.core.diff import Wanted, folders_above
from runner.dataset.leftovers import note_name, part_name
from runner.dataset.task import Check, Checked, Recorded, Task
from runner.errors import CloudrunError, DataError, ExitCode, ObjectChanged, ObjectMissing
from runner.storage.api import ObjectStore, find
from runner.storage.local import as_ours, translating, write_all

READ_AT_ONCE = 256 << 10
"""Bytes: as many as stay in a core's own cache until they are looked at."""

MADE_AT_MOST = 4096
"""Folders of which is kept in mind that they are there."""

SHUTTING = 1.0
"""Seconds in which a rename that is under way should end."""

RENAMING = 0.001
"""Seconds that one usually takes at most."""

AT_ONCE = 1 << 20
"""Bytes: an object up to this size comes into memory whole and is written once, with the fewest calls."""


class SyncStopped(CloudrunError):
    """Asked to stop. What was fetched is kept: the same sync goes on from there."""

    exit_code = ExitCode.PREEMPTED


class Content(NamedTuple):
    """What a file holds: size in bytes, modification time in nanoseconds, checksum as 8 hex digits."""

    size: int
    mtime_ns: int
    crc32c: str


def content_of(path: Path | str) -> Content:
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


def _as_it_came(path: str, checksum: int) -> Content:
    """A file whose checksum was computed on the way: it is not read once more."""
    info = os.stat(path)
    return Content(info.st_size, info.st_mtime_ns, f"{checksum:08x}")


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


class Gate:
    """What every file passes on the way into its place. Once it is shut nothing passes any more.

    No lock: small files come through by the thousand. Whoever passes first says that it is inside and then looks
    whether the gate is shut; whoever shuts it first says so and then looks who is inside.
    """

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self.is_shut = False

    def __enter__(self) -> None:
        self._inside.add(threading.get_ident())
        if self.is_shut:
            self._inside.discard(threading.get_ident())
            raise SyncStopped("it came too late: nobody waits for it any more")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.discard(threading.get_ident())

    def shut(self) -> None:
        """Return when nobody is inside any more, or after a while: a rename may hang with its disk."""
        self.is_shut = True
        give_up = time.monotonic() + SHUTTING
        while self._inside and time.monotonic() < give_up:
            time.sleep(RENAMING)


class Places:
    """The folders of an entry that files are put into. Safe to use from several threads."""

    def __init__(self, files: Path) -> None:
        self._files = str(files)
        self._made: set[str] = set()

    def publish(self, part: str, path: str) -> None:
        """Give the part its name below ``files``. Raises DataError when something that is not ours is in the way."""
        target = f"{self._files}/{path}"
        folder = target.rpartition("/")[0]
        self.make(folder)
        try:
            try:
                os.replace(part, target)
            except FileNotFoundError:
                # Whoever removes what has gone from the source also removes the folders that this leaves empty.
                self._made.discard(folder)
                self.make(folder)
                os.replace(part, target)
        except IsADirectoryError as error:
            raise DataError(f"{target}: a folder that cloudrun did not make is in the way", "remove it") from error

    def make(self, folder: str) -> None:
        """Make a folder. Raises DataError when it would be outside, or something that is not ours is in the way."""
        if folder in self._made:
            return
        if not self._is_inside(folder):
            raise DataError(f"{folder} leads out of the cache", "remove the symbolic link that somebody made there")
        try:
            os.makedirs(folder, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(f"{folder}: a file that cloudrun did not bring is in the way", "remove it") from error
        if len(self._made) >= MADE_AT_MOST:
            self._made.clear()
        self._made.add(folder)

    def remove(self, path: str) -> None:
        """Remove a file that we brought, and the folders that this leaves empty."""
        target = f"{self._files}/{path}"
        if not self._is_inside(os.path.dirname(target)):
            return
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(target)
        with suppress(OSError):
            for folder in folders_above(path):
                os.rmdir(f"{self._files}/{folder}")
                self._made.discard(f"{self._files}/{folder}")

    def remove_empty(self, folder: str) -> None:
        """Remove a folder unless something is in it."""
        with suppress(OSError):
            os.rmdir(f"{self._files}/{folder}")

    def _is_inside(self, folder: str) -> bool:
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self._files))


class Fetcher:
    """Brings objects of a store into an entry, and checks what is there. Safe to use from several threads.

    ``quits`` says that nobody waits for what is under way any more.
    """

    def __init__(self, store: ObjectStore, files: Path, parts: Path, quits: Callable[[], bool]) -> None:
        self._store = store
        self._files = str(files)
        self._parts = str(parts)
        self._quits = quits
        self._places = Places(files)
        self._gate = Gate()
        self._numbers = itertools.count()
        self._mine = secrets.token_hex(6)
        self.meter = Meter()

    def __call__(self, task: Task) -> Recorded | Checked:
        """The file, in place and recorded as what came; or what the check found. An object that is replaced meanwhile
        gets a second try, as what it is by then.
        """
        if self._quits():
            raise SyncStopped(f"stopped before {task.key}")
        if isinstance(task, Check):
            return Checked(task.wanted, self._is_sound(task))
        try:
            return self._bring(task)
        except ObjectChanged:
            return self._bring(self._listed_again(task))

    def shut(self) -> None:
        """From now on no file is put into its place, whoever is still at work on it."""
        self._gate.shut()

    def _is_sound(self, task: Check) -> bool:
        try:
            return content_of(f"{self._files}/{task.wanted.path}").crc32c == task.crc32c
        except OSError:
            # What cannot be read is no good either, and the cure is the same.
            return False

    def _bring(self, item: Wanted) -> Recorded:
        content = self._at_once(item) if item.size <= AT_ONCE else self._in_pieces(item)
        return Recorded(item.path, item.key, item.size, item.version, content.mtime_ns, content.crc32c)

    def _at_once(self, item: Wanted) -> Content:
        data, version = self._store.look(item.key, at_most=AT_ONCE)
        if version != item.version:
            raise ObjectChanged(f"{item.key} is not the version that was listed")
        _check_size(item, len(data))
        part = f"{self._parts}/{self._mine}-{next(self._numbers)}"
        try:
            mtime_ns = _write_new(part, data)
            self._publish(part, item)
        except OSError as error:
            _remove(part)
            raise as_ours(error, item.path) from error
        except BaseException:
            _remove(part)
            raise
        self.meter.add(len(data))
        return Content(len(data), mtime_ns, f"{crc32c(data):08x}")

    def _in_pieces(self, item: Wanted) -> Content:
        """What has come when this is cut short stays where the store has noted how far it is."""
        count = FileMeter(self.meter, item.size)
        part = f"{self._parts}/{part_name(item)}"
        note = note_name(part)

        def moved(size: int) -> None:
            if self._quits():
                raise SyncStopped(f"stopped while fetching {item.key}")
            count.add(size)

        try:
            checksum = self._store.download(item.key, Path(part), version=item.version, on_bytes=moved, note=Path(note))
            with translating(item.path):
                content = content_of(part) if checksum is None else _as_it_came(part, checksum)
                _check_size(item, content.size)
                self._publish(part, item)
        except BaseException as error:
            count.move_to(0)
            # Whom nobody waits for touches nothing: another sync may be at work on this very part by now.
            if not self._gate.is_shut and (isinstance(error, ObjectChanged) or not os.path.exists(note)):
                _remove(part, note)
            raise
        count.move_to(item.size)
        return content

    def _publish(self, part: str, item: Wanted) -> None:
        with self._gate:
            self._places.publish(part, item.path)

    def _listed_again(self, item: Wanted) -> Wanted:
        now = find(self._store, item.key)
        if now is None:
            raise ObjectMissing(f"{item.key} has vanished from {self._store.url}", "run again when it is at rest")
        return item._replace(size=now.size, version=now.version)


def _check_size(item: Wanted, size: int) -> None:
    if size != item.size:
        raise ObjectChanged(f"{item.key}: {size} bytes arrived where {item.size} were listed")


def _write_new(path: str, data: bytes) -> int:
    """Write a new file; its modification time in nanoseconds."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, data)
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def _remove(*paths: str) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
