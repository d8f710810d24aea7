"""What lies in one entry of the data cache, and which of it may be believed after a crash or a power cut."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.dataset.task import Recorded
from runner.errors import AccessDenied, CloudrunError, CorruptData, DataError, DiskFull, StoreUnreachable
from runner.files import make_directory
from runner.storage.local import FULL, as_ours

FORMAT = 1
"""Version of the record's layout."""

PATIENCE = 30.0
"""Seconds that a reader waits while the record is being written."""

CACHED = 8 << 10
"""KiB of each database that are kept in memory."""

RESERVE = 256 << 10
"""Bytes that are kept free for the record of what has come."""

ASKED_AT_ONCE = 900
"""Paths in one question: what every build of the library takes."""

SCHEMA = f"""
BEGIN;
CREATE TABLE header (
  source TEXT NOT NULL, include TEXT NOT NULL, exclude TEXT NOT NULL, completed_at REAL, files INTEGER, bytes INTEGER
);
CREATE TABLE file (
  path TEXT PRIMARY KEY, key TEXT NOT NULL, size INTEGER NOT NULL, version TEXT NOT NULL, mtime_ns INTEGER NOT NULL,
  crc32c TEXT NOT NULL
) WITHOUT ROWID;
PRAGMA user_version = {FORMAT};
COMMIT;
"""


COLUMNS = "path, key, size, version, mtime_ns, crc32c FROM file"


class RecordLost(CorruptData):
    """The record is no database any more, or none of ours: nothing of the entry can be believed."""


class NoRoomForRecord(DiskFull):
    """The disk has no room for what has to be written down, apart from any content."""


_OURS: dict[int, tuple[type[CloudrunError], str]] = {
    sqlite3.SQLITE_FULL: (NoRoomForRecord, "free some space on that disk"),
    sqlite3.SQLITE_READONLY: (AccessDenied, "check the owner, the mode and the mount options"),
    sqlite3.SQLITE_CANTOPEN: (AccessDenied, "check the owner, the mode and the mount options"),
    sqlite3.SQLITE_PERM: (AccessDenied, "check the owner, the mode and the mount options"),
    sqlite3.SQLITE_IOERR: (StoreUnreachable, ""),
    sqlite3.SQLITE_BUSY: (StoreUnreachable, "another program holds the record open"),
    sqlite3.SQLITE_CORRUPT: (RecordLost, ""),
    sqlite3.SQLITE_NOTADB: (RecordLost, ""),
    # Tables that are not as we make them.
    sqlite3.SQLITE_ERROR: (RecordLost, ""),
    sqlite3.SQLITE_CONSTRAINT: (RecordLost, ""),
    sqlite3.SQLITE_MISMATCH: (RecordLost, ""),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry holds, without its list of files. ``completed_at`` is None while files are missing."""

    source: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    completed_at: float | None = None
    files: int = 0
    bytes: int = 0


UNKNOWN = Header("")


@dataclass(frozen=True, slots=True)
class Entry:
    """The folder of one dataset in the cache. What may be believed of ``files/`` stands in ``record.db``."""

    folder: Path

    @property
    def files(self) -> Path:
        """What the trainer sees."""
        return self.folder / "files"

    @property
    def parts(self) -> Path:
        """Files on their way; apart from ``files`` so that no trainer ever meets one."""
        return self.folder / "parts"

    @property
    def record(self) -> Path:
        return self.folder / "record.db"

    @property
    def listing(self) -> Path:
        """What the source holds, while a sync runs."""
        return self.folder / "listing.db"

    @property
    def reserve(self) -> Path:
        """Room for the record, should the disk become full while files come."""
        return self.folder / "reserve"

    @property
    def claim(self) -> Path:
        """How many bytes it is going to hold, while it is being filled."""
        return self.folder / "claim"

    @property
    def lock(self) -> Path:
        """Held exclusively while the entry is being filled."""
        return self.folder / "lock"

    @property
    def in_use(self) -> Path:
        """Held shared by jobs that read the files; its modification time says when they last did."""
        return self.folder / "in-use"

    def exists(self) -> bool:
        return self.folder.is_dir()

    def is_void(self) -> bool:
        """Nothing has come of it yet: no file, and no part of one."""
        return not self.is_complete() and _is_empty(self.files) and _is_empty(self.parts)

    def refuse_links(self) -> None:
        """Raises DataError when somebody has put a symbolic link where we write: it may lead anywhere."""
        for folder in (self.files, self.parts):
            if folder.is_symlink():
                raise DataError(f"{folder} is a symbolic link, which leads out of the cache", "remove the link")

    def touch(self) -> None:
        """Note that the entry is of use now."""
        self.in_use.touch()

    def last_used(self) -> float:
        """Epoch seconds; 0 for never."""
        with suppress(FileNotFoundError):
            return self.in_use.stat().st_mtime
        return 0.0

    def header(self) -> Header:
        """What the entry holds; cheap when it is complete."""
        with suppress(sqlite3.DatabaseError, ValueError, TypeError), closing(_connect(self.record, "rw")) as database:
            return _header(database)
        return UNKNOWN

    def is_complete(self) -> bool:
        return self.header().completed_at is not None

    def claimed(self) -> int:
        """Bytes; counts only while the entry is being filled."""
        with suppress(FileNotFoundError, ValueError):
            return int(self.claim.read_text())
        return 0

    def sweep(self) -> None:
        """Remove what a dead process left behind, but for parts, which may be of use. Only for the lock's holder."""
        for old in ("manifest.json", "progress.jsonl", "listing.db", "listing.db-journal", "reserve", "claim"):
            (self.folder / old).unlink(missing_ok=True)


class Record:
    """The record of an entry, open for the holder of its lock; used by one thread.

    A row is written only after the file that it names has reached the disk. ``database`` is for the listing, which
    stands beside the record and is compared with it.

    ``names_all`` is False when files may be there that no row names: a process died after it had put them into their
    places, or the record was lost.
    """

    def __init__(self, entry: Entry, header: Header) -> None:
        self._entry = entry
        self._held = ExitStack()
        self._disk: int | None = None
        with recording(entry):
            self.database = self._held.enter_context(closing(_open(entry, header)))
            self.names_all = self.header().completed_at is not None or _is_empty(entry.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def header(self) -> Header:
        return _header(self.database)

    def known(self, paths: Collection[str]) -> dict[str, Recorded]:
        """What is recorded of these paths; each file still has to be looked at. Raises RecordLost for what is none of
        ours.
        """
        return {row[0]: _believed(row) for row in select(self.database, COLUMNS, paths)}

    def reopen(self) -> None:
        """Declare the entry incomplete, before any of its files is touched. All rows stay."""
        make_directory(self._entry.files)
        make_directory(self._entry.parts)
        if self._disk is None:
            self._disk = os.open(self._entry.files, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._held.callback(os.close, self._disk)
        self._set_aside()
        self._write("UPDATE header SET completed_at = NULL", [()])

    def add(self, batch: Iterable[Recorded]) -> None:
        """Put files that are in place on record: one flush for all of them, then their rows; also on a full disk."""
        rows = list(batch)
        if rows:
            self.flush()
            self._write("INSERT OR REPLACE INTO file VALUES (?, ?, ?, ?, ?, ?)", rows)

    def remove(self, paths: Collection[str]) -> None:
        """Forget files that were removed: a power cut must not bring back what no record will name any more."""
        self.flush()
        self._write("DELETE FROM file WHERE path = ?", [(path,) for path in paths])

    def complete(self, now: float) -> None:
        """Declare the entry complete, last of all."""
        # First of all, since they give the room that this may need.
        self._entry.reserve.unlink(missing_ok=True)
        shutil.rmtree(self._entry.parts, ignore_errors=True)
        self.flush()
        files, size = _totals(self.database)
        self._write("UPDATE header SET completed_at = ?, files = ?, bytes = ?", [(now, files, size)])

    def flush(self) -> None:
        """Make all that was written to the entry durable, and learn of it when the disk could not do that."""
        assert self._disk is not None, "what has not been reopened is not written to"
        sync_file_system(self._disk, self._entry.files)

    def _set_aside(self) -> None:
        with open(self._entry.reserve, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, RESERVE)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._entry.reserve.unlink()

    def _write(self, statement: str, rows: Collection[Sequence[object]]) -> None:
        """In one transaction; on a full disk the reserve is given up for it."""
        try:
            self._execute(statement, rows)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            self._entry.reserve.unlink(missing_ok=True)
            self._execute(statement, rows)

    def _execute(self, statement: str, rows: Collection[Sequence[object]]) -> None:
        with self.database:
            self.database.executemany(statement, rows)


def looks_right(file: Recorded, folder: str) -> bool:
    """Whether the file below ``folder`` has the size and the time that it was given when it was written."""
    try:
        info = os.lstat(f"{folder}/{file.path}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns)


@contextmanager
def recording(entry: Entry) -> Iterator[None]:
    """Turn the errors of the database, and of the disk that it is on, into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = f"{entry.folder}: no room for the record of what is there"
            raise NoRoomForRecord(message, "free some space on that disk") from error
        raise as_ours(error, str(entry.folder)) from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code not in _OURS:
            raise
        kind, hint = _OURS[code]
        raise kind(f"{entry.record}: {error}", hint) from error


def select(database: sqlite3.Connection, what: str, paths: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table (``columns FROM table``) for these paths."""
    waiting = iter(paths)
    while some := tuple(islice(waiting, ASKED_AT_ONCE)):
        marks = ", ".join("?" * len(some))
        yield from database.execute(f"SELECT {what} WHERE path IN ({marks})", some).fetchall()


def sync_file_system(descriptor: int, folder: Path) -> None:
    """Make everything written to the file system of ``folder`` durable; far cheaper than one fsync per small file.

    The system tells of a failed write only to descriptors that were open by then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(descriptor):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(folder))


def _open(entry: Entry, header: Header) -> sqlite3.Connection:
    """The database of an entry; a new one where there is none that can be believed."""
    make_directory(entry.folder)
    try:
        return _existing(entry)
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR):
            raise
        return _create(entry, header)


def _existing(entry: Entry) -> sqlite3.Connection:
    with ExitStack() as undo:
        database = undo.enter_context(closing(_connect(entry.record, "rw")))
        _header(database)
        undo.pop_all()
        return database


def forget(entry: Entry) -> None:
    """Throw the record away: nothing is known of the entry any more."""
    for path in (entry.record, entry.record.with_name("record.db-journal")):
        path.unlink(missing_ok=True)


def _create(entry: Entry, header: Header) -> sqlite3.Connection:
    forget(entry)
    database = _connect(entry.record, "rwc")
    database.executescript(SCHEMA)
    with database:
        row = header.source, json.dumps(header.include), json.dumps(header.exclude)
        database.execute("INSERT INTO header VALUES (?, ?, ?, NULL, 0, 0)", row)
    return database


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    with ExitStack() as undo:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=PATIENCE)
        undo.callback(database.close)
        # A commit that returned survives a power cut, and so does the end of its journal.
        database.execute("PRAGMA synchronous = EXTRA")
        database.execute(f"PRAGMA cache_size = -{CACHED}")
        undo.pop_all()
        return database


def _header(database: sqlite3.Connection) -> Header:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    row = database.execute("SELECT source, include, exclude, completed_at, files, bytes FROM header").fetchone()
    if version != FORMAT or row is None:
        raise ValueError("no record of ours")
    source, include, exclude, completed_at, files, size = row
    header = Header(str(source), tuple(json.loads(include)), tuple(json.loads(exclude)))
    if completed_at is None:
        files, size = _totals(database)
        return replace(header, files=files, bytes=size)
    return replace(header, completed_at=float(completed_at), files=int(files), bytes=int(size))


def _believed(row: tuple[Any, ...]) -> Recorded:
    file = Recorded(*row)
    if not all(map(isinstance, file, (str, str, int, str, int, str))):
        raise RecordLost(f"the record of {file.path!r} makes no sense")
    return file


def _is_empty(folder: Path) -> bool:
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        return next(found, None) is None
    return True


def _totals(database: sqlite3.Connection) -> tuple[int, int]:
    files, size = database.execute("SELECT count(*), coalesce(sum(size), 0) FROM file").fetchone()
    return int(files), int(size)
