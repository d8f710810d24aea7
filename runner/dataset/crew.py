"""Threads that work through tasks, a few at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from runner.dataset.task import Checked, Failure, Outcome, Recorded, Task, as_exception

WAITING_EACH = 8
"""Tasks that wait for each thread."""

ENDING = 2.0
"""Seconds in which what has been begun may end, once nobody waits for it any more."""

Post = Callable[[list[Outcome]], None]
"""Takes the outcomes of one group of tasks; called from many threads."""


class Crew:
    """Threads that take groups of tasks as they get free.

    After the first failure, or once they are to end, no further task is begun.
    """

    def __init__(self, work: Callable[[Task], Recorded | Checked], threads: int, post: Post) -> None:
        self._work = work
        self._post = post
        self._groups = SimpleQueue[Sequence[Task] | None]()
        self._halted = threading.Event()
        self._threads = [
            threading.Thread(target=self._labour, name=f"copy-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def capacity(self) -> int:
        """How many tasks keep all threads busy for a while."""
        return WAITING_EACH * len(self._threads)

    def hand(self, tasks: Sequence[Task], together: int = 1) -> None:
        """Each thread takes ``together`` of them at a time and posts their outcomes at once."""
        for first in range(0, len(tasks), together):
            self._groups.put(tasks[first : first + together])

    def end(self) -> None:
        """Begin nothing more."""
        self._halted.set()
        for _ in self._threads:
            self._groups.put(None)

    def join(self, until: float) -> None:
        """Wait for the threads to end, but not beyond ``until``, by the monotonic clock. A store that is silent holds
        up a thread for as long as it likes: such a one is left to itself.
        """
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _labour(self) -> None:
        while (group := self._groups.get()) is not None:
            self._post([self._attempt(task) for task in group if not self._halted.is_set()])

    def _attempt(self, task: Task) -> Outcome:
        try:
            return self._work(task)
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the error becomes a value
            self._halted.set()
            return Failure(task.key, as_exception(error))
