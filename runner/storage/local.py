"""The local side of a transfer: files that must not change while they are read, fast copies, system errors as ours."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.errors import AccessDenied, BadKey, CloudrunError, DiskFull, SourceChanged, StoreError, StoreUnreachable
from runner.storage.api import OnBytes, Sink, ignore_bytes
from runner.units import format_size

CHUNK = 8 << 20
"""Bytes per step of a copy, and so per call of its progress listener."""

SEEN_AT_ONCE = 1 << 20

DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
BAD_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ})
UNREACHABLE = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ENOLCK,
        errno.EMFILE,
        errno.ENFILE,
    }
)
# Answers of a system call that mean "not between these two file systems": another way of copying may work.
UNSUPPORTED = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
)

Fingerprint = tuple[int, int, int]
"""Size in bytes, modification time in nanoseconds, inode: equal means the same content, as far as a disk can tell."""


def fingerprint(info: os.stat_result) -> Fingerprint:
    return info.st_size, info.st_mtime_ns, info.st_ino


def no_room(where: str, needed: int, free: int, hint: str = "") -> DiskFull:
    """The error for ``needed`` bytes that do not fit into the ``free`` ones; says how many are missing.

    ``where`` completes "4.1 GiB free ...", such as "on /cache".
    """
    figures = f"needs {format_size(needed)}, {format_size(free)} free {where}"
    if needed > free:
        return DiskFull(f"no room: {figures}, {format_size(needed - free)} missing", hint)
    return DiskFull(
        f"no room: {figures}, and still the system says that it is full",
        hint or "is there a quota, or are there too many files?",
    )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the file system of ``folder``, which must exist."""
    numbers = os.statvfs(folder)
    return numbers.f_bavail * numbers.f_frsize


def as_ours(error: OSError, what: str) -> CloudrunError:
    """The error of ours that says the same as the system's, about ``what``."""
    message = f"{what}: {(error.strerror or str(error)).lower()}"
    if error.errno in DENIED:
        return AccessDenied(message, "check the owner, the mode and the mount options")
    if error.errno in FULL:
        return DiskFull(message)
    if error.errno in BAD_NAME:
        return BadKey(message)
    return StoreUnreachable(message) if error.errno in UNREACHABLE else StoreError(message)


@contextmanager
def translating(what: str, *, room: tuple[Path, int] | None = None) -> Iterator[None]:
    """Turn the system's errors into ours. ``room``, (folder, bytes needed), lets DiskFull say what is missing."""
    try:
        yield
    except OSError as error:
        if room and error.errno in FULL:
            raise no_room(f"on {room[0]}", room[1], free_bytes(room[0])) from error
        raise as_ours(error, what) from error


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A local file that is being read: its descriptor, its size in bytes, and what it looked like at first."""

    path: Path
    fd: int
    size: int
    seen: Fingerprint

    def check(self) -> None:
        """Raise SourceChanged unless the file is still the same, unchanged, under the same name."""
        # What has the name is the file that is open, since the inode is part of a fingerprint.
        if current(self.path) != self.seen:
            raise SourceChanged(f"{self.path} changed while it was read")


@contextmanager
def reading(path: Path) -> Iterator[OpenSource]:
    """The file ``path``, open for reading. Raises SourceChanged when it has gone."""
    with translating(str(path)):
        fd = _open_source(path)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise StoreError(f"{path} is not a regular file")
        yield OpenSource(path, fd, info.st_size, fingerprint(info))
    finally:
        os.close(fd)


def _open_source(source: Path) -> int:
    try:
        # Without O_NONBLOCK a named pipe would hold us until somebody writes into it.
        return os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SourceChanged(f"{source} has gone") from None


def current(path: Path) -> Fingerprint | None:
    """The fingerprint of what has this name now; None when nothing has."""
    try:
        return fingerprint(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; the system may take them in pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _by_range(source: int, target: int, count: int) -> int:
    return os.copy_file_range(source, target, count)


def _by_sendfile(source: int, target: int, count: int) -> int:
    # None: read from, and advance, the position of ``source``. The stubs know only the other form.
    return os.sendfile(target, source, None, count)


def _by_hand(source: int, target: int, count: int) -> int:
    data = os.read(source, min(count, 1 << 20))
    write_all(target, data)
    return len(data)


CopyStep = Callable[[int, int, int], int]
COPY_STEPS: tuple[CopyStep, ...] = (_by_range, _by_sendfile, _by_hand)
"""Fastest first: inside the file system (or its server), inside the kernel, through this process."""


def copy_bytes(
    source: int, target: int, count: int, on_bytes: OnBytes = ignore_bytes, steps: tuple[CopyStep, ...] = COPY_STEPS
) -> int:
    """Copy ``count`` bytes from where ``source`` stands; returns how many there were. Falls back step by step."""
    moved = 0
    step, *others = steps
    while moved < count:
        try:
            size = step(source, target, min(CHUNK, count - moved))
        except OSError as error:
            if error.errno not in UNSUPPORTED or not others:
                raise
            size = 0
        if size == 0 and not others:
            break
        # Some file systems claim "end of file" for what they cannot copy: only the last step is believed.
        if size == 0:
            step, *others = others
        moved += size
        if size:
            on_bytes(size)
    return moved


def copy_seen(source: int, target: int, sink: Sink, on_bytes: OnBytes = ignore_bytes) -> None:
    """Copy all that follows, through this process, so that ``sink`` sees what is written."""
    buffer = memoryview(bytearray(SEEN_AT_ONCE))
    while count := os.readv(source, [buffer]):
        sink(buffer[:count])
        write_all(target, buffer[:count])
        on_bytes(count)
