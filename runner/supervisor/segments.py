"""Append-only records in numbered segments: written here, copied to the store as they grow.

The journal and the trainer's log both live this way: ``<folder>/000001``, ``<folder>/000002`` ... The folder on the
disk mirrors the keys in the store, so one reader serves both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runner.files import make_directory

SEGMENT_BYTES = 1 << 20


class SegmentWriter:
    """One record. ``path_of(n)`` names segment n. Safe to use from several threads.

    A second writer of the same record goes on behind the segments of the first.
    """

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._lock = threading.Lock()
        self._number = 0
        self._fd: int | None = None
        self._size = 0

    def append(self, data: bytes, *, durable: bool = False) -> None:
        """Add bytes to the newest segment, opening the next one when it is full.

        With ``durable``, they survive a power cut once this returns. Raises OSError when the disk is full: then a part
        of ``data`` may have been written.
        """
        with self._lock:
            fd = self._writable()
            while data:
                written = os.write(fd, data)
                self._size += written
                data = data[written:]
            if durable:
                os.fsync(fd)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):  # the bytes are as safe as they will ever be, and the descriptor is gone
                os.close(fd)

    def _writable(self) -> int:
        if self._fd is None or self._size >= SEGMENT_BYTES:
            self._close()
            self._fd = self._open_next()
            self._size = 0
        return self._fd

    def _open_next(self) -> int:
        number = self._number + 1
        while (path := self._path_of(number)).exists():
            number += 1
        make_directory(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._number = number
        return fd
