"""Which of several failures is told."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future

import pytest

from runner.errors import AccessDenied
from runner.storage.requests import raise_first


def failed(error: BaseException) -> Future[None]:
    future = Future[None]()
    future.set_exception(error)
    return future


@pytest.mark.parametrize("first", [True, False])
def test_the_cause_is_raised_and_not_what_ended_because_of_it(*, first: bool) -> None:
    futures = [failed(AccessDenied("no")), failed(CancelledError())]
    with pytest.raises(AccessDenied):
        raise_first(futures if first else futures[::-1])
