"""What lies in one entry of the data cache, and which of it may be believed after a crash or a power cut."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runner.core.diff import flaw
from runner.files import make_directory, sync_directory, write_atomically

FORMAT = 1
"""Version of the manifest's layout."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A file that was fetched and checked: where from, and what it looks like here. ``crc32c`` is 8 hex digits."""

    path: str
    key: str
    size: int
    version: str
    mtime_ns: int
    crc32c: str


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
    """The folder of one dataset in the cache.

    ``manifest.json`` exists exactly when ``files/`` is complete; until then ``progress.jsonl`` tells which files are.
    A line of either is written only after the file that it names has reached the disk.
    """

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
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.jsonl"

    @property
    def lock(self) -> Path:
        """Held exclusively while the entry is being filled."""
        return self.folder / "lock"

    @property
    def in_use(self) -> Path:
        """Held shared by jobs that read the files; its modification time says when they last did."""
        return self.folder / "in-use"

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
        with suppress(FileNotFoundError, ValueError, TypeError), open(self.manifest, "rb") as file:
            return _header_of(json.loads(file.readline().rstrip() + b"]}"))
        rows = list(_rows(self.progress))
        if not rows:
            return UNKNOWN
        files = _recorded(rows[1:])
        begun = rows[0]
        return Header(
            str(begun.get("source", "")),
            tuple(begun.get("include", ())),
            tuple(begun.get("exclude", ())),
            files=len(files),
            bytes=sum(file.size for file in files.values()),
        )

    def is_complete(self) -> bool:
        return self.manifest.exists()

    def read(self) -> dict[str, Recorded]:
        """Every file that may be believed to be here, by path; each still has to be looked at."""
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError), open(self.manifest, "rb") as file:
            return _recorded(json.load(file)["files"])
        return _recorded(list(_rows(self.progress))[1:])

    def reopen(self, header: Header, known: Iterable[Recorded]) -> Progress:
        """Declare the entry incomplete, in this order: first what is known of it is safe elsewhere, then the
        manifest goes. All of ``known`` stays on record, also what is about to be removed: see :meth:`complete`.
        """
        make_directory(self.files)
        make_directory(self.parts)
        begun = {"source": header.source, "include": header.include, "exclude": header.exclude}
        write_atomically(self.progress, _lines([begun, *map(_row, known)]))
        with suppress(FileNotFoundError):
            self.manifest.unlink()
            sync_directory(self.folder)
        return Progress(self)

    def complete(self, header: Header, files: Mapping[str, Recorded]) -> None:
        """Write the manifest, last of all. Everything that it names must be on the disk."""
        write_atomically(self.manifest, _manifest(header, files))
        self.progress.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a dead process left half done. Only for the holder of the lock."""
        shutil.rmtree(self.parts, ignore_errors=True)
        if self.is_complete():
            self.progress.unlink(missing_ok=True)


class Progress:
    """The growing record of an incomplete entry."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._file: BinaryIO = open(entry.progress, "ab")  # noqa: SIM115 - closed by close()

    def commit(self, batch: list[Recorded]) -> None:
        """Put the batch on record: one flush for all its files, then their lines. Lines never outrun their files."""
        if not batch:
            return
        sync_file_system(self._entry.files)
        self._file.write(_lines(map(_row, batch)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def sync_file_system(folder: Path) -> None:
    """Make everything written to the file system of ``folder`` durable; far cheaper than one fsync per small file."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(fd)


def _row(file: Recorded) -> dict[str, Any]:
    return {
        "path": file.path,
        "key": file.key,
        "size": file.size,
        "version": file.version,
        "mtime_ns": file.mtime_ns,
        "crc32c": file.crc32c,
    }


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _manifest(header: Header, files: Mapping[str, Recorded]) -> bytes:
    """JSON whose first line holds everything but the files: whoever asks only for that need not read a million rows."""
    head = {
        "format": FORMAT,
        "source": header.source,
        "include": header.include,
        "exclude": header.exclude,
        "completed_at": header.completed_at,
        "count": len(files),
        "bytes": sum(file.size for file in files.values()),
    }
    rows = b",\n".join(json.dumps(_row(file)).encode() for file in files.values())
    return json.dumps(head).encode()[:-1] + b', "files": [\n' + rows + b"\n]}\n"


def _header_of(data: dict[str, Any]) -> Header:
    return Header(
        str(data["source"]),
        tuple(data["include"]),
        tuple(data["exclude"]),
        float(data["completed_at"]),
        int(data["count"]),
        int(data["bytes"]),
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a progress file, up to the first that a crash cut short."""
    with suppress(FileNotFoundError, ValueError), open(path, "rb") as file:
        for line in file:
            row = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(row, dict):
                return
            yield row


def _recorded(rows: Iterable[dict[str, Any]]) -> dict[str, Recorded]:
    """Later rows count. Paths are checked as those of a listing are: a record must not lead outside either."""
    files: dict[str, Recorded] = {}
    for row in rows:
        with suppress(KeyError, TypeError, ValueError):
            file = _file_of(row)
            if not flaw(file.path):
                files[file.path] = file
    return files


def _file_of(row: dict[str, Any]) -> Recorded:
    numbers = int(row["size"]), int(row["mtime_ns"])
    return Recorded(str(row["path"]), str(row["key"]), numbers[0], str(row["version"]), numbers[1], str(row["crc32c"]))
