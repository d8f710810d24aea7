"""What proves a file: blake3 of the whole, crc32c of each part; computed while the bytes pass, or in one reading."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import blake3
import crc32c

from runner.checkpoint.manifest import PART_SIZE
from runner.errors import SourceChanged
from runner.storage.local import reading, translating

CHUNK = 4 * 1024 * 1024


class Digest(NamedTuple):
    """blake3 of a whole file as 64 hex digits, and crc32c of each part."""

    blake3: str
    crc32c: tuple[int, ...]


class Digesting:
    """The digest of the bytes that pass, in order. :meth:`begin` starts anew: the file is read from its beginning."""

    def __init__(self, part_size: int = PART_SIZE) -> None:
        self._part_size = part_size
        self.begin()

    def begin(self) -> Callable[[memoryview], None]:
        self._whole = blake3.blake3(max_threads=blake3.blake3.AUTO)
        self._sums: list[int] = []
        self._left = 0
        return self.add

    def add(self, data: memoryview) -> None:
        self._whole.update(data)
        while data:
            if not self._left:
                self._sums.append(0)
                self._left = self._part_size
            piece = data[: self._left]
            self._sums[-1] = crc32c.crc32c(piece, self._sums[-1])
            self._left -= len(piece)
            data = data[len(piece) :]

    def result(self) -> Digest:
        return Digest(self._whole.hexdigest(), tuple(self._sums))


def digest(path: Path, part_size: int = PART_SIZE, halt: Callable[[], None] = lambda: None) -> Digest:
    """Read a file once, with 4 MiB of memory. Raises SourceChanged when it changes meanwhile; ``halt`` may raise too.

    Read, not mapped: a file that shrinks under a mapping kills the process that looks at it.
    """
    digesting = Digesting(part_size)
    with reading(path) as source, translating(str(path)):
        buffer = memoryview(bytearray(min(source.size, CHUNK)))
        left = source.size
        while left:
            halt()
            count = os.readv(source.fd, [buffer[:left]])
            if not count:
                raise SourceChanged("the file became shorter while it was read")
            digesting.add(buffer[:count])
            left -= count
        source.check()
    return digesting.result()
