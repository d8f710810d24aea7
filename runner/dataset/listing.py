"""The listing of a source, made by a thread of its own, page by page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from runner.dataset.source import Source, objects_of
from runner.dataset.task import as_exception
from runner.storage.api import ObjectInfo

PAGE = 1000
"""Objects that are compared at a time."""

PAGES_AHEAD = 4
"""Pages that may wait to be compared."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some objects of the source."""

    objects: list[ObjectInfo]


@dataclass(frozen=True, slots=True)
class ListingEnded:
    """The listing is complete, or was broken off by ``error``."""

    error: Exception | None


class Lister:
    """A thread that lists a source and posts its pages; never more than a few ahead of those that were released."""

    def __init__(self, source: Source, post: Callable[[Page | ListingEnded], None]) -> None:
        self._source = source
        self._post = post
        self._slots = threading.Semaphore(PAGES_AHEAD)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="list", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """One page has been compared."""
        self._slots.release()

    def end(self) -> None:
        """List no more, also in the middle."""
        self._ending.set()
        self._slots.release()

    def join(self, until: float) -> None:
        """Wait for the end, but not beyond ``until``, by the monotonic clock: a store that is silent may hold it up for
        long.
        """
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        try:
            self._list()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the error becomes a value
            self._post(ListingEnded(as_exception(error)))
        else:
            self._post(ListingEnded(None))

    def _list(self) -> None:
        objects = objects_of(self._source, self._ending.is_set)
        while page := list(islice(objects, PAGE)):
            self._slots.acquire()
            self._post(Page(page))
