"""How a store's requests are sent: each through the retry layer and with a turn of the throttle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from dataclasses import dataclass
from typing import TypeVar

from runner.storage.bucket import Bucket
from runner.storage.buffers import Buffers
from runner.storage.retrying import Retry
from runner.storage.throttle import Throttle

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Requests:
    """What every request of a store shares: the bucket, the retry layer, the throttle, the memory."""

    bucket: Bucket
    retry: Retry
    throttle: Throttle
    buffers: Buffers

    def what(self, key: str) -> str:
        return f"{self.bucket.url}/{key}"

    def send(self, operation: str, request: Callable[[], _Result]) -> _Result:
        """What ``request`` returns, in the end; each try waits for its turn."""

        def in_turn() -> _Result:
            with self.throttle.turn():
                return request()

        return self.retry(operation, in_turn)


def raise_first(futures: list[Future[_Result]]) -> None:
    """Wait for all, or for the first error, and raise that; those that only ended because of it are not it."""
    wait(futures, return_when=FIRST_EXCEPTION)
    errors = [error for one in futures if one.done() and (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, CancelledError)):
        raise error
