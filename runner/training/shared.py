"""Saves into shared memory: one copy of the state, then the training goes on.

A slot is a file in a folder of the supervisor's, in memory. This process copies the state there; the supervisor, which
does not die with us, brings it to the disk and says when the slot may be written again. Two slots, so that one can be
written while the other is on its way.

    offset 0       header: magic (16 bytes) | state | sequence | step | rank (u32) | world (u32) | meta | image
                   (u64 each where nothing is said, little endian; meta and image are lengths in bytes)
    offset 4096    meta: UTF-8 JSON, then zeros up to a multiple of 4096
    then           image: a whole safetensors file
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.training.channel import Channel, complain
from runner.training.image import Image
from runner.training.ranks import Ranks

MAGIC = b"CLOUDRUN-SLOT-1\n"
HEADER = struct.Struct("<16sQQQIIQQ")
EMPTY, WRITING, READY = range(3)
PAGE = 4096
STATE_AT = 16  # offset of the state, of which only the first byte is ever other than zero

SLOTS = 2
# The next state may be a little larger: longer random states, another loader position.
SLACK = 1 << 20
WAIT_S = 60.0
_STEP = 16 << 20  # bytes that are prepared at a time, so that the training is never held up for long
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14

_FREE, _BUSY, _NONE = range(3)


class Fallback(Protocol):
    """A save to the disk, for when there is no room in memory. All ranks call it together."""

    def save(
        self, image: Image, meta: bytes, step: int, asked: bool, shards: Mapping[str, Tensor] | None = None
    ) -> bool:
        """True when the state is on the disk. Raises OSError when it cannot be."""


class NoRoom(OSError):
    """Shared memory cannot hold the state; the message says why."""


class SharedMemory:
    """A destination for saves. The ranks call ``save`` together, with the same step.

    What does not fit into memory, and what finds no supervisor, goes to ``fallback``; that is said once.
    """

    def __init__(self, channel: Channel, fallback: Fallback, ranks: Ranks) -> None:
        self._channel = channel
        self._fallback = fallback
        self._ranks = ranks
        self._why_not = channel.welcome.why_not
        self._slots: list[Slot] = []
        self._sequence = 0
        self._changed = threading.Condition()
        self._said: set[str] = set()
        channel.on_answer(self._answered)

    def prepare(self, size: int) -> None:
        """Make room for images of ``size`` bytes, in the background: the first save then costs what all others cost.

        A size that fits what is there changes nothing.
        """
        needed = _capacity(size)
        if self._why_not or (self._slots and self._slots[0].capacity >= needed):
            return
        try:
            self._make_slots(needed)
        except OSError as error:
            self._give_up(f"no room in shared memory: {error}")

    def save(
        self, image: Image, meta: bytes, step: int, asked: bool, shards: Mapping[str, Tensor] | None = None
    ) -> bool:
        """True when the state is safe: in the supervisor's care, or on the disk. False when this save was skipped.

        Only a save that was not ``asked`` for is skipped: when the one before it is still on its way. Sharded tensors
        (``shards``) always go to the disk.
        """
        began = time.perf_counter()
        slot = None if shards else self._free_slot(PAGE + _padded(len(meta)) + image.size, asked=asked)
        state = _NONE if shards or self._why_not or not self._channel.alive else _BUSY if slot is None else _FREE
        worst = self._ranks.highest(state)[0]
        if worst == _NONE:
            return self._fallback.save(image, meta, step, asked, shards)
        if worst == _BUSY or slot is None:
            self._say("a save was skipped: the ones before it are still on their way to the disk")
            return False
        return self._fill(slot, image, meta, step, began, asked=asked)

    def _fill(self, slot: Slot, image: Image, meta: bytes, step: int, began: float, *, asked: bool) -> bool:
        self._sequence += 1
        slot.busy = self._sequence
        slot.write(image, meta, (self._sequence, step, self._ranks.rank, self._ranks.world))
        stall = time.perf_counter() - began
        return self._channel.snapshot(slot.name, self._sequence, step, stall, "asked" if asked else "cadence")

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _free_slot(self, needed: int, *, asked: bool) -> Slot | None:
        """A slot for so many bytes; None when all are on their way, or there are none."""
        if not self._why_not and (not self._slots or self._slots[0].capacity < needed):
            self._grow(needed)
        give_up = time.monotonic() + WAIT_S
        with self._changed:
            while not self._why_not and self._channel.alive:
                if free := [slot for slot in self._slots if not slot.busy]:
                    return self._first_usable(free)
                if not asked:
                    return None
                if not self._changed.wait(min(1.0, give_up - time.monotonic())) and time.monotonic() >= give_up:
                    self._give_up(f"the supervisor has not saved a snapshot within {WAIT_S:g} s")
        return None

    def _first_usable(self, free: list[Slot]) -> Slot | None:
        """One that is prepared already rather than one that is not."""
        for slot in sorted(free, key=lambda slot: not slot.is_ready):
            try:
                slot.wait_until_reserved()
            except OSError as error:
                self._slots.remove(slot)
                if not self._slots:
                    self._give_up(f"no room in shared memory: {error}")
            else:
                return slot
        return None

    def _grow(self, needed: int) -> None:
        """The state is larger than it was said to be, or nobody said how large it is."""
        give_up = time.monotonic() + WAIT_S
        with self._changed:
            while any(slot.busy for slot in self._slots) and self._channel.alive:
                if not self._changed.wait(1.0) and time.monotonic() >= give_up:
                    break
        self.prepare(needed)

    def _make_slots(self, capacity: int) -> None:
        """As many as fit, two at most. Raises OSError when there is no room for one."""
        folder = Path(self._channel.welcome.shared_memory)
        for slot in self._slots:
            slot.remove()
        self._slots = []
        with _claiming(folder):
            left = self._channel.welcome.room - _claimed(folder)
            if capacity > left:
                raise NoRoom(f"{capacity >> 20} MiB are needed, {max(0, left) >> 20} MiB are left of what may be taken")
            # All ranks may be of the same size, and each needs one.
            both = SLOTS * capacity * self._ranks.world <= self._channel.welcome.room
            for number in range(SLOTS if both and SLOTS * capacity <= left else 1):
                self._slots.append(Slot(folder / f"rank{self._ranks.rank}-{number}", capacity))
        threading.Thread(target=_reserve_all, args=(tuple(self._slots),), name="cloudrun memory", daemon=True).start()

    def _answered(self, slot: str, sequence: int) -> None:
        """In the channel's thread."""
        with self._changed:
            for one in self._slots:
                if one.name == slot and one.busy == sequence:
                    one.busy = 0
            self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        self._why_not = why
        self._say(f"checkpoints are written directly, which holds the training up: {why}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            complain(text)
            self._channel.remark(text)


class Slot:
    """One file of memory. ``busy`` is the sequence of what is on its way from here, 0 when it may be written."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Makes the file and claims its size; :meth:`reserve` takes the memory. Raises OSError."""
        self.name = path.name
        self.capacity = capacity
        self.busy = 0
        self._path = path
        path.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._fd, capacity)
        self._map: mmap.mmap | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reserved = threading.Event()
        self._ready = threading.Event()
        self._failure: OSError | None = None

    @property
    def is_ready(self) -> bool:
        """All its memory is there, and known to this process."""
        return self._ready.is_set()

    def reserve(self) -> None:
        """Take the memory: until then a write may find none and end the process. Takes about half a second per GiB."""
        try:
            for start in range(0, self.capacity, _STEP):
                os.posix_fallocate(self._fd, start, min(_STEP, self.capacity - start))
            self._map = mmap.mmap(self._fd, self.capacity)
            self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        except OSError as error:
            self._failure = _no_memory(error)
            self.remove()
        finally:
            os.close(self._fd)
            self._reserved.set()
        if self._failure is None:
            self._fault_in()
            _pin(self._memory)
        self._ready.set()

    def _fault_in(self) -> None:
        """Let this process know every page now; an old kernel that cannot do it leaves that to the first save."""
        madvise, start = ctypes.CDLL(None, use_errno=True).madvise, self._memory.data_ptr()
        for done in range(0, self.capacity, _STEP):
            size = min(_STEP, self.capacity - done)
            if madvise(ctypes.c_void_p(start + done), ctypes.c_size_t(size), _POPULATE_WRITE):
                return

    def wait_until_reserved(self) -> None:
        """Raises OSError when there is no memory for it."""
        if not self._reserved.wait(WAIT_S):
            raise NoRoom(f"the memory was not there within {WAIT_S:g} s")
        if self._failure is not None:
            raise self._failure

    def write(self, image: Image, meta: bytes, told: tuple[int, int, int, int]) -> None:
        """Fill the slot; ``told`` is sequence, step, rank, world. READY comes last: before, nobody looks at it."""
        assert self._map is not None, "it has been reserved"
        self._map[STATE_AT] = WRITING
        sequence, step, rank, world = told
        HEADER.pack_into(self._map, 0, MAGIC, WRITING, sequence, step, rank, world, len(meta), image.size)
        self._map[PAGE : PAGE + len(meta)] = meta
        start = PAGE + _padded(len(meta))
        image.copy_into(self._memory[start : start + image.size])
        self._map[STATE_AT] = READY

    def remove(self) -> None:
        """Give the memory back, as soon as nobody has it mapped."""
        self._path.unlink(missing_ok=True)
        _unpin(self._memory)


def _reserve_all(slots: tuple[Slot, ...]) -> None:
    """In a thread that only works when no other wants to."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for slot in slots:
        slot.reserve()


def _pin(memory: Tensor) -> None:
    """Let a GPU copy straight into it, where the training has one. Where that fails, the copies are only slower."""
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)


def _unpin(memory: Tensor) -> None:
    cuda: Any = torch.cuda
    if cuda.is_initialized() and memory.is_pinned():
        cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _no_memory(error: OSError) -> OSError:
    words = "shared memory is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return NoRoom(error.errno or errno.ENOMEM, words)


def _capacity(size: int) -> int:
    return _padded(PAGE + size + max(SLACK, size // 64))


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


@contextmanager
def _claiming(folder: Path) -> Iterator[None]:
    """One rank after the other."""
    fd = os.open(folder / "claims", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _claimed(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rank*-*"))
