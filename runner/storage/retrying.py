"""The one retry layer: waits, tries again, says so, and gives up in time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import tenacity

from runner.clock import Clock, SystemClock
from runner.errors import CloudrunError, ObjectChanged, ObjectExists, SourceChanged
from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, Sink, find, ignore_bytes
from runner.storage.waiting import LOOK

FIRST_WAIT = 0.5
"""Seconds: the longest wait after the first failure; it doubles with each further one. The wait itself is random."""

SHORTEST_WAIT = 0.1
LONGEST_WAIT = 30.0

OnRetry = Callable[[str, CloudrunError, float], None]
"""Called before each wait with the operation, the error and the seconds until the next try."""

_Result = TypeVar("_Result")


def worth_retrying(error: BaseException) -> bool:
    """True when the same call may succeed later.

    A file or an object that changed is no fault of the store: the caller has to look at it again, not we.
    """
    return may_pass(error) and not isinstance(error, SourceChanged | ObjectChanged)


def may_pass(error: BaseException) -> bool:
    """True for errors of ours that say of themselves that trying again can help."""
    return isinstance(error, CloudrunError) and error.retryable


def ignore_retry(_operation: str, _error: CloudrunError, _wait: float) -> None:
    """The listener of callers that do not show retries."""


def never() -> float:
    """The deadline of callers that have none."""
    return math.inf


class Retry:
    """Tries again what may pass, for up to ``give_up_after`` seconds from a call's first failure.

    The last error is raised as it came. ``stop`` ends a wait at once, with the last error. ``deadline`` says, whenever
    it is asked, the epoch second after which nothing is tried again: an interruption notice shortens what is left, also
    of a wait that has begun.
    """

    def __init__(
        self,
        give_up_after: float,
        *,
        on_retry: OnRetry = ignore_retry,
        stop: threading.Event | None = None,
        deadline: Callable[[], float] = never,
        clock: Clock | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._give_up_after = give_up_after
        self.on_retry = on_retry
        self._deadline = deadline
        self._clock = clock or SystemClock()
        self.stop = stop or threading.Event()
        self._sleep = sleep or self._wait

    def is_over(self) -> bool:
        """Whether nothing is tried again any more, whatever it is."""
        return self.stop.is_set() or self._clock.now() > self._deadline()

    def _wait(self, seconds: float) -> None:
        while seconds > 0 and not self.is_over():
            self.stop.wait(min(seconds, LOOK))
            seconds -= LOOK

    def __call__(
        self, operation: str, call: Callable[[], _Result], worth: Callable[[BaseException], bool] = worth_retrying
    ) -> _Result:
        """What ``call`` returns, in the end. ``operation`` names it for the listener."""
        try:
            return call()
        except CloudrunError as error:
            if not worth(error):
                raise
            # Small objects come by the thousand: what works at once must not pay for what may fail.
            return self._again(operation, call, worth, error)

    def _again(
        self,
        operation: str,
        call: Callable[[], _Result],
        worth: Callable[[BaseException], bool],
        first: CloudrunError,
    ) -> _Result:
        patience = _Patience(self._give_up_after, self._deadline, self._clock)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(worth),
            wait=patience.wait,
            stop=lambda _state: self.stop.is_set() or patience.is_over(),
            before_sleep=lambda state: self.on_retry(operation, _error_of(state), state.upcoming_sleep),
            sleep=self._sleep,
            reraise=True,
        )(self._unless_over(call, first))

    def went_on(self, operation: str, error: CloudrunError) -> None:
        """Tell of a failure after which the call goes on at once, since much had moved before it."""
        self.on_retry(operation, error, 0.0)

    def _unless_over(self, call: Callable[[], _Result], first: CloudrunError) -> Callable[[], _Result]:
        """``call``, whose first try has failed already; it raises its last error instead of trying again once that
        :meth:`is_over`.
        """
        last: list[CloudrunError] = []

        def attempt() -> _Result:
            if not last:
                last[:] = [first]
                raise first
            if self.is_over():
                raise last[-1]
            try:
                return call()
            except CloudrunError as error:
                last[:] = [error]
                raise

        return attempt


def write_surely(
    retry: Retry, store: ObjectStore, key: str, data: bytes, write: Callable[[], ObjectInfo]
) -> ObjectInfo:
    """A conditional write that knows its own bytes again when an answer was lost: a name that is taken by exactly
    ``data`` counts as ours, from the second try on.
    """
    tries = 0

    def attempt() -> ObjectInfo:
        nonlocal tries
        tries += 1
        try:
            return write()
        except (ObjectExists, ObjectChanged):
            info = _ours(store, key, data) if tries > 1 else None
            if info is None:
                raise
            return info

    return retry("write", attempt)


def _ours(store: ObjectStore, key: str, data: bytes) -> ObjectInfo | None:
    found = find(store, key)
    return found if found is not None and store.look(key) == (data, found.version) else None


class RetryingStore:
    """An :class:`ObjectStore` that tries whole operations again: for folders, where one is a system call or few."""

    def __init__(self, store: ObjectStore, retry: Retry) -> None:
        self._store = store
        self._retry = retry

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def exclusive(self) -> bool:
        return self._store.exclusive

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        # Collected before the first object is handed out: a listing that starts again must not repeat itself.
        return iter(self._retry("list", lambda: list(self._store.list(prefix))))

    def folders(self, prefix: str = "") -> Iterator[str]:
        return iter(self._retry("list", lambda: list(self._store.folders(prefix))))

    def read(self, key: str) -> bytes:
        return self._retry("read", lambda: self._store.read(key))

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        return self._retry("read", lambda: self._store.look(key, at_most=at_most))

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        def write() -> ObjectInfo:
            return self._store.write(key, data, only_new=only_new, replacing=replacing)

        if not only_new and replacing is None:
            return self._retry("write", write)
        return write_surely(self._retry, self._store, key, data, write)

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> int | None:
        # Without a version any will do, so one that was replaced meanwhile is no news for the caller.
        worth = may_pass if version is None else worth_retrying
        return self._retry(
            "download",
            lambda: self._store.download(key, target, version=version, on_bytes=on_bytes, note=note),
            worth,
        )

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        return self._retry("upload", lambda: self._store.upload(source, key, on_bytes=on_bytes, sink=sink, note=note))

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        return self._retry("copy", lambda: self._store.copy(source, key, version=version))

    def delete(self, keys: Iterable[str]) -> None:
        doomed = tuple(keys)
        self._retry("delete", lambda: self._store.delete(doomed))

    def sweep(self, prefix: str, before: float) -> None:
        self._retry("sweep", lambda: self._store.sweep(prefix, before))


class _Patience:
    """How long one call may go on failing; counted from its first failure: a long transfer gets a second try."""

    def __init__(self, seconds: float, limit: Callable[[], float], clock: Clock) -> None:
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._deadline: float | None = None
        self._backoff = tenacity.wait_random_exponential(multiplier=FIRST_WAIT, min=SHORTEST_WAIT, max=LONGEST_WAIT)

    def wait(self, state: tenacity.RetryCallState) -> float:
        """Seconds until the next try; never beyond the deadline, so that the last try is made just then."""
        return max(0.0, min(self._backoff(state), self._left()))

    def is_over(self) -> bool:
        return self._left() <= 0

    def _left(self) -> float:
        now = self._clock.now()
        if self._deadline is None:
            self._deadline = now + self._seconds
        return min(self._deadline, self._limit()) - now


def _error_of(state: tenacity.RetryCallState) -> CloudrunError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, CloudrunError)
    return error
