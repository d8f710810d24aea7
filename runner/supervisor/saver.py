"""Brings one snapshot from shared memory to the disk: a small process of ours that stands in nobody's way.

Runs as a script, ``python -I -S saver.py``, and needs the standard library only. One order comes as JSON on standard
input, one answer goes as JSON to standard output:

    {"target": "/.../step-000000000012", "part": "/.../.snapshot-...", "hurried": false,
     "copies": [{"name": "state.safetensors", "source": "/dev/shm/.../rank0-0", "offset": 8192, "bytes": 1073741824}],
     "texts": {"state.json": "..."}}

    {"saved": true} or {"failed": "why"}

``target`` appears whole or not at all, and is durable when the answer comes. One that is there already stays: the same
step of the same run is the same state. It is written past the page cache where the file system can do that: the disk
then fetches the bytes from shared memory itself, and the processors, which the trainer needs, have little to do.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import sys
from contextlib import suppress
from typing import Any

WINDOW = 32 << 20  # bytes that are mapped, or on their way to the disk, at a time
BLOCK = 4096  # what is written past the page cache begins and ends at multiples of this

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13
_SYNC_BEGIN = 2
_SYNC_FINISH = 1 | 2 | 4


def stand_back() -> None:
    """Take the processors and the disk only when nobody else wants them."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    # Between sessions the scheduler weighs these groups first, and a process only within its own.
    with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write("19")
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)


def save(order: dict[str, Any]) -> None:
    """Write the folder under its temporary name, then give it its own. Raises OSError, and leaves nothing behind."""
    target, part = order["target"], order["part"]
    try:
        _check_room(os.path.dirname(target), sum(copy["bytes"] for copy in order["copies"]))
        os.mkdir(part)
        for copy in order["copies"]:
            _copy(copy, os.path.join(part, copy["name"]))
        for name, text in order["texts"].items():
            _write(os.path.join(part, name), text.encode())
        _sync_folder(part)
        _publish(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _check_room(folder: str, needed: int) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < needed:  # some file systems do not say how large they are
        raise OSError(errno.ENOSPC, f"the disk is full: {needed} bytes are needed, {free} are free", folder)


def _publish(part: str, target: str) -> None:
    if os.path.exists(os.path.join(target, "state.json")):
        shutil.rmtree(part)
        return
    os.rename(part, target)
    _sync_folder(os.path.dirname(target))


def _copy(copy: dict[str, Any], path: str) -> None:
    source = os.open(copy["source"], os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(source).st_size < copy["offset"] + copy["bytes"]:
            raise OSError(errno.EIO, "the snapshot is shorter than it says")
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            done = _copy_past_the_cache(source, copy["offset"], path, copy["bytes"])
            _copy_through_the_cache(source, copy["offset"], target, done, copy["bytes"])
            os.fsync(target)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _copy_past_the_cache(source: int, offset: int, path: str, size: int) -> int:
    """Bytes written, from the start: whole blocks only, and none where the file system cannot do it."""
    try:
        target = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        return _unless_unsupported(error, 0)
    done, whole = 0, size - size % BLOCK
    try:
        while done < whole:
            window = min(WINDOW, whole - done)
            with mmap.mmap(source, window, prot=mmap.PROT_READ, offset=offset + done) as view:
                written = os.pwrite(target, view, done)
            done += written - written % BLOCK
            if written % BLOCK or not written:
                return done
    except OSError as error:
        return _unless_unsupported(error, done)
    finally:
        os.close(target)
    return done


def _unless_unsupported(error: OSError, done: int) -> int:
    if error.errno in (errno.EINVAL, errno.ENOTSUP):
        return done
    raise error


def _copy_through_the_cache(source: int, offset: int, target: int, done: int, size: int) -> None:
    """The rest. What is on its way to the disk stays within two windows, so that nobody is throttled for it later."""
    sync_file_range = ctypes.CDLL(None).sync_file_range
    os.lseek(target, done, os.SEEK_SET)
    while done < size:
        sent = os.sendfile(target, source, offset + done, min(WINDOW, size - done))
        if not sent:
            raise OSError(errno.EIO, "the snapshot is shorter than it says")
        sync_file_range(target, ctypes.c_int64(done), ctypes.c_int64(sent), _SYNC_BEGIN)
        before = max(0, done - WINDOW)
        sync_file_range(target, ctypes.c_int64(before), ctypes.c_int64(done - before), _SYNC_FINISH if done else 0)
        done += sent


def _write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        _unless_unsupported(error, 0)
    finally:
        os.close(fd)


def main() -> int:
    """Carry out the one order; the answer says what came of it."""
    order = json.load(sys.stdin)
    if not order["hurried"]:
        stand_back()
    try:
        save(order)
    except OSError as error:
        print(json.dumps({"failed": error.strerror or str(error)}))  # noqa: T201 - the answer
        return 1
    print(json.dumps({"saved": True}))  # noqa: T201 - the answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
