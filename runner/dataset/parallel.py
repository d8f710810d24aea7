"""Work on many items with a few threads, never holding more than a few of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Failure(Generic[_Item]):
    """An item whose work raised ``error``."""

    item: _Item
    error: Exception


class Tick:
    """Nothing happened for a while: time to look at the clock."""


class _Left:
    """A worker has gone."""


class Crew(Generic[_Item, _Result]):
    """Threads that take items from one iterator as they get free.

    After the first failure, or once ``stop`` is set, no further item is begun; those begun end. ``dropped`` is set
    when nobody waits for the results any more: work that takes long should look at it.
    """

    def __init__(
        self, items: Iterable[_Item], work: Callable[[_Item], _Result], *, workers: int, stop: threading.Event
    ) -> None:
        self._items = iter(items)
        self._work = work
        self._workers = workers
        self._stop = stop
        self._failed = threading.Event()
        self._taking = threading.Lock()
        self._results = SimpleQueue[_Result | Failure[_Item] | _Left]()
        self.dropped = threading.Event()

    def results(self, tick: float) -> Generator[_Result | Failure[_Item] | Tick, None, None]:
        """Every result and failure as it comes; a Tick for each ``tick`` seconds without one."""
        threads = [threading.Thread(target=self._labour, name=f"copy-{number}") for number in range(self._workers)]
        for thread in threads:
            thread.start()
        try:
            yield from self._collect(len(threads), tick)
        except BaseException:
            self.dropped.set()
            raise
        finally:
            self._failed.set()
            for thread in threads:
                thread.join()

    def rest(self) -> Iterator[_Result]:
        """Results that came when nobody waited any more, after :meth:`results` was closed."""
        while not self._results.empty():
            result = self._results.get()
            if not isinstance(result, Failure | _Left):
                yield result

    def _collect(self, working: int, tick: float) -> Iterator[_Result | Failure[_Item] | Tick]:
        while working:
            try:
                result = self._results.get(timeout=tick)
            except Empty:
                yield Tick()
                continue
            if isinstance(result, _Left):
                working -= 1
            else:
                yield result

    def _labour(self) -> None:
        try:
            for item in iter(self._take, None):
                self._results.put(self._attempt(item))
        finally:
            self._results.put(_Left())

    def _take(self) -> _Item | None:
        with self._taking:
            done = self._failed.is_set() or self._stop.is_set()
            return None if done else next(self._items, None)

    def _attempt(self, item: _Item) -> _Result | Failure[_Item]:
        try:
            return self._work(item)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a value
            self._failed.set()
            return Failure(item, error)
