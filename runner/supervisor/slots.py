"""The shared memory of one run: its folder, its slots, and how much of it there may be.

A slot is a file ``rank<rank>-<number>`` that a trainer's rank maps and writes; see :mod:`runner.training.shared`, which
holds the same constants. Nothing in it is trusted but what its header says and its size allows.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.local import delete

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory is what is wanted; the folder below is private
MAGIC = b"CLOUDRUN-SLOT-1\n"
HEADER = struct.Struct("<16sQQQIIQQ")
EMPTY, WRITING, READY = range(3)
PAGE = 4096
STATE_AT = 16  # offset of the state

LOCK = "lock"
LARGEST_META = 64 << 20
# Another job's unsaved snapshot is left alone so long: its supervisor may be about to start again.
LEFTOVER_S = 3600.0
SHARE_OF_MEMORY = 0.4

_NAME = re.compile(r"rank(\d{1,6})-(\d{1,2})")
_BUSY_S = 30.0


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that is READY. ``meta`` and ``image`` are lengths in bytes."""

    path: Path
    rank: int
    world: int
    sequence: int
    step: int
    meta: int
    image: int

    @property
    def image_at(self) -> int:
        """Where the image begins, in bytes from the start of the file."""
        return PAGE + -(-self.meta // PAGE) * PAGE

    def read_meta(self) -> bytes:
        """Raises OSError when the slot has gone."""
        with open(self.path, "rb") as file:
            file.seek(PAGE)
            return file.read(self.meta)


def read_slot(path: Path) -> Slot | None:
    """The slot, when it is READY and its header is possible; None otherwise."""
    name = _NAME.fullmatch(path.name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        header = os.read(fd, HEADER.size) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(fd)
    if name is None or len(header) < HEADER.size:
        return None
    magic, state, sequence, step, rank, world, meta, image = HEADER.unpack(header)
    slot = Slot(path, rank, world, sequence, step, meta, image)
    possible = rank == int(name[1]) and rank < world and step < 1 << 53 and meta <= LARGEST_META
    whole = magic == MAGIC and state == READY and slot.image_at + image <= status.st_size
    return slot if possible and whole else None


def clear_slot(slot: Slot) -> None:
    """Say that nobody needs its content any more; one that has gone is no error."""
    with suppress(FileNotFoundError):
        fd = os.open(slot.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, EMPTY.to_bytes(8, "little"), STATE_AT)
        finally:
            os.close(fd)


def newest_whole(slots: list[Slot]) -> list[Slot]:
    """The slots of the newest step of which every rank has one, by rank; empty when there is none."""
    for step in sorted({slot.step for slot in slots}, reverse=True):
        of_step = {slot.rank: slot for slot in slots if slot.step == step}
        if is_whole(of_step):
            return [of_step[rank] for rank in sorted(of_step)]
    return []


def is_whole(of_step: dict[int, Slot]) -> bool:
    """True when every rank has its slot, and all agree on how many ranks there are."""
    worlds = {slot.world for slot in of_step.values()}
    return len(worlds) == 1 and len(of_step) == worlds.pop()


class SharedFolder:
    """A private folder in shared memory, ours while its lock is held: by this process, or by a saver of ours."""

    def __init__(self, root: Path, identity: str) -> None:
        """``identity`` tells runs on this machine apart."""
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        self.path = root / f"cloudrun-{os.getuid()}-{digest[:16]}"
        self._lock: int | None = None

    @property
    def lock(self) -> int:
        """The descriptor of the lock, for a saver that must keep it."""
        assert self._lock is not None, "the folder is open"
        return self._lock

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self, within: float = _BUSY_S) -> None:
        """Make the folder if need be, and lock it. Raises OSError when it is not ours, or another process keeps it."""
        if self._lock is not None:
            return
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        if not _is_private(self.path):
            raise PermissionError(f"{self.path} belongs to somebody else")
        give_up = time.monotonic() + within
        while (lock := _try_lock(self.path / LOCK)) is None:
            if time.monotonic() >= give_up:
                raise TimeoutError(f"another process uses {self.path}")
            time.sleep(0.05)
        self._lock = lock

    def slots(self) -> list[Slot]:
        """Those that are READY."""
        return [slot for path in self._files() if (slot := read_slot(path)) is not None]

    def touch(self) -> None:
        """Note that what lies here is of now."""
        os.utime(self.lock)

    def empty(self) -> None:
        """Delete all slots."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Let go of the folder; with ``remove``, nothing of it stays."""
        if self._lock is None:
            return
        if remove:
            _remove(self.path)
        os.close(self._lock)
        self._lock = None

    def _files(self) -> list[Path]:
        try:
            return [path for path in sorted(self.path.iterdir()) if _NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []


def remove_leftovers(root: Path, ours: Path, now: float) -> None:
    """Delete the folders of our user's dead jobs: at once where nothing in them waits to be saved, else in an hour."""
    for path in root.glob(f"cloudrun-{os.getuid()}-*"):
        with suppress(OSError):  # others clean up too
            if path == ours or not _is_private(path):
                continue
            lock = _try_lock(path / LOCK)
            if lock is None:
                continue
            try:
                if now - os.fstat(lock).st_mtime > LEFTOVER_S or not any(map(read_slot, path.iterdir())):
                    _remove(path)
            finally:
                os.close(lock)


def _is_private(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _try_lock(path: Path) -> int | None:
    """The locked descriptor; None when somebody holds the lock, or deleted it meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _remove(folder: Path) -> None:
    """The lock goes last: a folder without one would look unused."""
    for path in folder.iterdir():
        if path.name != LOCK:
            delete(path)
    delete(folder)


# -- how much there may be ---------------------------------------------------------------------------------------------


def room_in(root: Path, system: Path = Path("/")) -> int:
    """Bytes that may be taken in shared memory below ``root``: what is free there, and a share of the free memory."""
    disk, share = os.statvfs(root), int(free_memory(system) * SHARE_OF_MEMORY)
    # A tmpfs without a limit does not say how large it is.
    return max(0, min(disk.f_bavail * disk.f_frsize, share) if disk.f_blocks else share)


def free_memory(system: Path = Path("/")) -> int:
    """Bytes that this machine, and every control group we are in, has left. What can be dropped counts as free."""
    told = re.search(r"^MemAvailable:\s*(\d+) kB", (system / "proc/meminfo").read_text(), re.MULTILINE)
    return min([int(told[1]) << 10 if told else 0, *_left_in_groups(system)])


def _left_in_groups(system: Path) -> Iterator[int]:
    for line in (system / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left_above(system / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _left_above(system / "sys/fs/cgroup/memory", path, *names)


def _left_above(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """What is left under each limit from the root down to ``path``. In a container only the root may be visible."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        folder = root.joinpath(*parts[:depth])
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            allowed = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(kept.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
            yield allowed - (used - files)
