"""What a source holds, kept on the disk while it is listed and compared: any number of objects in little memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Self

from runner.core.diff import Odd, Wanted, flaw, folders_above
from runner.dataset.record import CACHED, Entry, Record, RecordLost, select
from runner.dataset.room import Need

BIG = 16 << 20
"""Bytes: larger objects come in pieces, and a sync that was cut short goes on inside them."""

ROWS_AT_ONCE = 1000

SCHEMA = """
CREATE TABLE scratch.listed (
  path TEXT PRIMARY KEY, key TEXT NOT NULL, size INTEGER NOT NULL, version TEXT NOT NULL, todo INTEGER
) WITHOUT ROWID;
CREATE INDEX scratch.todo ON listed (todo) WHERE todo IS NOT NULL;
CREATE TABLE scratch.folder (path TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE scratch.place (place TEXT, key TEXT, path TEXT NOT NULL, PRIMARY KEY (place, key)) WITHOUT ROWID;
"""

# Sorted by bytes, ``0`` is what follows ``/``: everything between ``x/`` and ``x0`` lies in the folder ``x``.

IN_THE_WAY = """path FROM (
  SELECT l.path FROM listed l WHERE EXISTS (
    SELECT 1 FROM listed m WHERE m.path > l.path || '/' AND m.path < l.path || '0'
  ) OR EXISTS (
    SELECT 1 FROM file m WHERE m.path > l.path || '/' AND m.path < l.path || '0'
  )
)"""

CONTENDED = """
SELECT l.path, l.key, (SELECT m.key FROM listed m WHERE m.path > l.path || '/' AND m.path < l.path || '0' LIMIT 1)
  AS other
FROM listed l WHERE l.path > ? AND other IS NOT NULL ORDER BY l.path LIMIT 1000"""

ALIKE = """
SELECT p.path, p.key, (SELECT q.path FROM place q WHERE q.place = p.place ORDER BY q.key LIMIT 1) AS owner
FROM place p WHERE owner <> p.path LIMIT 1000"""

CONTENDED_IN_PLACES = """
SELECT p.path, p.key, (SELECT q.key FROM place q WHERE q.place > p.place || '/' AND q.place < p.place || '0' LIMIT 1)
  AS other
FROM place p WHERE other IS NOT NULL LIMIT 1000"""

PUT_ASIDE = """
UPDATE listed SET todo = ?2 WHERE path > ?1 || '/' AND path < ?1 || '0' AND todo IN (?3, ?4)"""

GONE = """
SELECT f.path FROM file f WHERE f.path > ? AND NOT EXISTS (SELECT 1 FROM listed l WHERE l.path = f.path)
ORDER BY f.path LIMIT 1000"""

NEED = """
SELECT coalesce(sum(l.size - l.known), 0), count(*) - coalesce(sum(l.known > 0), 0),
  coalesce(sum((l.size + :block - 1) / :block * :block - (l.known + :block - 1) / :block * :block), 0)
FROM (
  SELECT l.size, CASE WHEN (f.key, f.size, f.version) = (l.key, l.size, l.version) THEN 0 ELSE coalesce(f.size, 0) END
    AS known
  FROM listed l LEFT JOIN file f ON f.path = l.path WHERE l.todo IN (:small, :big, :blocked)
) l"""


class Todo(IntEnum):
    """What is to become of a listed object; nothing (NULL) where its file is right, or has been handed out."""

    SMALL = 1
    BIG = 2
    CHECK = 3
    BLOCKED = 4


@dataclass(frozen=True, slots=True)
class Amount:
    """So many files, with so many bytes."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.files + other.files, self.bytes + other.bytes)


class Worklist:
    """The objects that are wanted, by path, beside the record of what is here. Used by the record's thread.

    ``fold`` gives two paths one name where the cache's file system does; None where all paths are different files.
    """

    def __init__(self, record: Record, entry: Entry, fold: Callable[[str], str] | None = None) -> None:
        self._database = record.database
        self._file = entry.listing
        self._fold = fold
        # It need not outlive this process, so nothing waits for the disk.
        self._database.execute("ATTACH ? AS scratch", (str(self._file),))
        for setting in ("journal_mode = MEMORY", "synchronous = OFF", f"cache_size = -{CACHED}"):
            self._database.execute(f"PRAGMA scratch.{setting}")
        self._database.executescript(SCHEMA)
        self._waiting = Counter[Todo]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.unlink(missing_ok=True)

    def new(self, items: Iterable[Wanted]) -> list[Wanted]:
        """Those that were not listed before. Of a key that a page tells of twice the later news counts. One that came
        with an earlier page stays as it was: it may be on its way, and whoever fetches it finds out what it is by then.
        """
        by_path = {item.path: item for item in items}
        listed = {path for (path,) in select(self._database, "path FROM listed", by_path)}
        return [item for path, item in by_path.items() if path not in listed]

    @property
    def folds(self) -> bool:
        """True on a file system that takes some names for one: whose they are is known once all are listed."""
        return self._fold is not None

    def is_place_of_another(self, path: str) -> bool:
        """True when the name belongs to another object now, on a file system that does not tell the two apart."""
        if self._fold is None:
            return False
        found = self._database.execute("SELECT 1 FROM place WHERE place = ? LIMIT 1", (self._fold(path),))
        return found.fetchone() is not None

    def strangers(self, paths: list[str]) -> list[str]:
        """Those that are neither listed nor recorded."""
        harmless = [path for path in paths if not flaw(path)]
        ours = {path for (path,) in select(self._database, "path FROM listed", harmless)}
        ours |= {path for (path,) in select(self._database, "path FROM file", harmless)}
        return [path for path in paths if path not in ours and (flaw(path) or not self.is_place_of_another(path))]

    def add(self, rows: list[tuple[Wanted, Todo | None]]) -> None:
        self._waiting.update(todo for _, todo in rows if todo)
        with self._database:
            if self._fold:
                places = [(self._fold(item.path), item.key, item.path) for item, _ in rows]
                self._database.executemany("INSERT INTO place VALUES (?, ?, ?)", places)
            self._database.executemany(
                "INSERT INTO listed VALUES (?, ?, ?, ?, ?)", [(*item, todo) for item, todo in rows]
            )

    def add_folders(self, paths: Iterable[str]) -> None:
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO folder VALUES (?)", [(path,) for path in paths])

    def waiting(self, todo: Todo) -> int:
        """How many wait for this."""
        return self._waiting[todo]

    def take(self, todo: Todo, count: int) -> list[Wanted]:
        """Hand out up to so many; none when there are none. What something stands in the way of is put aside."""
        while rows := self._first(todo, min(count, ROWS_AT_ONCE)):
            blocked = self._blocked([row.path for row in rows])
            with self._database:
                self._database.executemany(
                    "UPDATE listed SET todo = ? WHERE path = ?",
                    [(Todo.BLOCKED if row.path in blocked else None, row.path) for row in rows],
                )
            self._waiting[todo] -= len(rows)
            self._waiting[Todo.BLOCKED] += len(blocked)
            if len(blocked) < len(rows):
                return [row for row in rows if row.path not in blocked]
        return []

    def put_back(self, item: Wanted) -> None:
        """It has to be fetched after all."""
        self._waiting[lane(item.size)] += 1
        with self._database:
            self._database.execute("UPDATE listed SET todo = ? WHERE path = ?", (lane(item.size), item.path))

    def unblock(self) -> None:
        """Nothing stands in the way any more."""
        with self._database:
            self._database.execute(
                "UPDATE listed SET todo = CASE WHEN size > ? THEN ? ELSE ? END WHERE todo = ?",
                (BIG, Todo.BIG, Todo.SMALL, Todo.BLOCKED),
            )
        self._count_waiting()

    def count(self) -> int:
        (files,) = self._database.execute("SELECT count(*) FROM listed").fetchone()
        return int(files)

    def leave_out_contended(self) -> Iterator[Odd]:
        """Take out files whose name is that of a folder: what lies in the folder is more. Of names that the file system
        takes for one that of the first key stays.
        """
        if self._fold is None:
            yield from self._leave_out_contended()
        else:
            yield from self._leave_out(ALIKE, "this disk takes it for {!r}")
            yield from self._leave_out(CONTENDED_IN_PLACES, "it would be a file where {!r} needs a folder")
        self._count_waiting()

    def _leave_out(self, question: str, reason: str) -> Iterator[Odd]:
        while rows := self._database.execute(question).fetchall():
            with self._database:
                self._database.executemany("DELETE FROM listed WHERE path = ?", [(path,) for path, _, _ in rows])
                self._database.executemany(
                    "DELETE FROM place WHERE key = ? AND place = ?", [(key, self._place(path)) for path, key, _ in rows]
                )
            for _, key, other in rows:
                yield Odd(key, reason.format(other))

    def _place(self, path: str) -> str:
        return self._fold(path) if self._fold else path

    def _leave_out_contended(self) -> Iterator[Odd]:
        """What lies in the folder is put aside, since the file may have been handed out already."""
        last = ""
        while rows := self._database.execute(CONTENDED, (last,)).fetchall():
            paths = [path for path, _, _ in rows]
            with self._database:
                self._database.executemany("DELETE FROM listed WHERE path = ?", [(path,) for path in paths])
                self._database.executemany(PUT_ASIDE, [(path, Todo.BLOCKED, Todo.SMALL, Todo.BIG) for path in paths])
            for _, key, other in rows:
                yield Odd(key, f"it would be a file where {other!r} needs a folder")
            last = rows[-1][0]

    def gone(self) -> Iterator[list[str]]:
        """Recorded paths that are not listed, some at a time."""
        last = ""
        while rows := self._database.execute(GONE, (last,)).fetchall():
            paths = [path for (path,) in rows]
            if not all(isinstance(path, str) for path in paths):
                raise RecordLost("a path of the record is no text")
            yield paths
            last = paths[-1]

    def folders(self) -> Iterator[str]:
        """Folders to be made; not those with the name of a file."""
        for (path,) in self._database.execute("SELECT path FROM folder"):
            names = [path, *folders_above(path)]
            if not any(select(self._database, "1 FROM listed", names)) and not any(
                map(self.is_place_of_another, names)
            ):
                yield path

    def need(self, block: int) -> Need:
        """Room for all that still has to be fetched; blocks of the disk have ``block`` bytes."""
        todo = {"small": Todo.SMALL, "big": Todo.BIG, "blocked": Todo.BLOCKED}
        size, files, on_disk = self._database.execute(NEED, {"block": block, **todo}).fetchone()
        return Need(size, on_disk, files)

    def still_to_fetch(self) -> Amount:
        """What has not been handed out."""
        question = "SELECT count(*), coalesce(sum(size), 0) FROM listed WHERE todo IN (?, ?, ?)"
        return Amount(*self._database.execute(question, (Todo.SMALL, Todo.BIG, Todo.BLOCKED)).fetchone())

    def _count_waiting(self) -> None:
        rows = self._database.execute("SELECT todo, count(*) FROM listed WHERE todo IS NOT NULL GROUP BY todo")
        self._waiting = Counter({Todo(todo): count for todo, count in rows})

    def _first(self, todo: Todo, count: int) -> list[Wanted]:
        question = "SELECT path, key, size, version FROM listed WHERE todo = ? LIMIT ?"
        return [Wanted(*row) for row in self._database.execute(question, (todo, count))]

    def _blocked(self, paths: list[str]) -> set[str]:
        """Those with a file, listed or recorded, above or below them."""
        above = {folder for path in paths for folder in folders_above(path)}
        files = {path for (path,) in select(self._database, "path FROM listed", above)}
        files |= {path for (path,) in select(self._database, "path FROM file", above)}
        blocked = {path for path in paths if files and not files.isdisjoint(folders_above(path))}
        return blocked | {path for (path,) in select(self._database, IN_THE_WAY, paths)}


def lane(size: int) -> Todo:
    """Which of two ways an object goes."""
    return Todo.BIG if size > BIG else Todo.SMALL
