"""Local files that survive a power cut, and locks between processes of one machine."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART_MARK = ".cloudrun-part"

STORE_LOCK = ".cloudrun-lock"

_NFS_LEFTOVER = re.compile(r"\.nfs[0-9a-fA-F]{16,}")


def part_path(target: Path) -> Path:
    """A temporary name beside ``target``: same file system, hidden, recognisable after a crash."""
    # A name may have 255 bytes, not characters.
    stem = os.fsencode(target.name)[:100].decode(errors="ignore")
    return target.with_name(f".{stem}.{secrets.token_hex(4)}{PART_MARK}")


def is_part(name: str) -> bool:
    """True for a temporary name made by :func:`part_path`."""
    return name.startswith(".") and name.endswith(PART_MARK)


def is_hidden(name: str) -> bool:
    """True for what is nobody's content: unfinished writes, locks, and what NFS keeps for those who still read it."""
    return is_part(name) or name == STORE_LOCK or _NFS_LEFTOVER.fullmatch(name) is not None


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` durable. Network file systems that cannot do it are excused."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents, durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    sync_directory(path.parent)


def replace_durably(part: Path, target: Path) -> None:
    """Publish ``part`` as ``target``. ``part`` must be synced already.

    An NFS server that lost its answer may report "no such file" for a rename that it did:
    then the target is our file, by inode, and all is well.
    """
    inode = part.stat().st_ino
    try:
        os.replace(part, target)
    except FileNotFoundError:
        if not target.exists() or target.stat().st_ino != inode:
            raise
    sync_directory(target.parent)


def write_atomically(target: Path, data: bytes) -> None:
    """Write ``data`` so that a reader, also after a power cut, sees the old file or the new one, whole."""
    make_directory(target.parent)
    part = part_path(target)
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_durably(part, target)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the advisory lock ``path``; it is released when the process dies, however it dies.

    Raises BlockingIOError when ``wait`` is false and another process holds it.
    """
    make_directory(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(fd, mode | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """True while some process holds the lock ``path``."""
    if not path.exists():
        return False
    try:
        with locked(path, wait=False):
            return False
    except BlockingIOError:
        return True
