"""Memory for bytes on their way: a fixed number of blocks, shared by all uploads of a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from runner.storage.waiting import IsOver, never_over, wait_until


class Buffers:
    """Blocks of memory to fill and send, ``most`` at the same time; whoever wants one more waits, and is told
    StoreUnreachable once ``is_over``.

    Blocks are used again while somebody uploads (fresh memory has to be faulted in page by page) and freed after that.
    """

    def __init__(self, most: int, is_over: IsOver = never_over) -> None:
        self._most = most
        self._is_over = is_over
        self._changed = threading.Condition()
        self._users = 0
        self._lent = 0
        self._free: list[bytearray] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep blocks for the next :meth:`take` while the block runs."""
        with self._changed:
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._free.clear()

    def take(self, size: int) -> bytearray:
        """A block of at least ``size`` bytes; waits until there is one."""
        with self._changed:
            wait_until(lambda: self._lent < self._most, self._changed, self._is_over)
            self._lent += 1
            block = self._free.pop() if self._free else bytearray()
        return block if len(block) >= size else bytearray(size)

    def give_back(self, block: bytearray) -> None:
        with self._changed:
            self._lent -= 1
            if self._users:
                self._free.append(block)
            self._changed.notify()
