"""Work on many files at once, which ends early when one fails or somebody says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from runner.errors import (
    CloudrunError,
    ExitCode,
)
from runner.storage.api import OnBytes

WORKERS = 4

Halt = Callable[[], bool]
"""True once the work that asks should end early."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class TransferStopped(CloudrunError):
    """Somebody asked the transfer to end early. Nothing was committed, nothing was published."""

    exit_code = ExitCode.PREEMPTED


def side_by_side(
    work: Callable[[_Item, Halt], _Result], items: Iterable[_Item], workers: int, stop: threading.Event
) -> list[_Result]:
    """``work`` on every item in threads; results in the order of the items.

    The first failure, or ``stop``, makes the others end early; the failure is raised when all have ended.
    """
    failed = threading.Event()

    def halt() -> bool:
        return failed.is_set() or stop.is_set()

    def attempt(item: _Item) -> _Result:
        try:
            unless(halt)
            return work(item, halt)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="checkpoint") as pool:
        try:
            futures = [pool.submit(attempt, item) for item in items]
            wait(futures)
        finally:
            failed.set()
    return _results(futures, stop)


def _results(futures: list[Future[_Result]], stop: threading.Event) -> list[_Result]:
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # The others only stopped because the first one failed.
    causes = [error for error in errors if not isinstance(error, TransferStopped)]
    if causes:
        raise causes[0]
    if errors or stop.is_set():
        raise TransferStopped("the transfer was stopped")
    return [future.result() for future in futures]


def unless(halt: Halt) -> None:
    if halt():
        raise TransferStopped("the transfer was stopped")


def listener(on_bytes: OnBytes, halt: Halt) -> OnBytes:
    """``on_bytes``, which also ends the transfer that calls it when ``halt`` says so."""

    def moved(count: int) -> None:
        unless(halt)
        on_bytes(count)

    return moved
