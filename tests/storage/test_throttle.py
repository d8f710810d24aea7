"""Turns for requests: never more than the store bears, and more again when it bears more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from runner.errors import StoreBusy, StoreUnreachable
from runner.storage.throttle import SETTLING, Throttle

BUSY = StoreBusy("slow down")


class FakeTime:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


def refused(throttle: Throttle, error: Exception = BUSY) -> None:
    with pytest.raises(type(error)), throttle.turn():
        raise error


def test_no_more_than_allowed_at_once() -> None:
    throttle, lock = Throttle(3), threading.Lock()
    inside, most = 0, 0
    full = threading.Barrier(3)

    def request(number: int) -> None:
        nonlocal inside, most
        with throttle.turn():
            with lock:
                inside += 1
                most = max(most, inside)
            full.wait(10)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(9) as pool:
        list(pool.map(request, range(9)))
    assert most == 3


def test_a_busy_store_gets_half_as_many_once_for_all_that_were_under_way() -> None:
    world = FakeTime()
    throttle = Throttle(64, world.now)
    for _ in range(10):
        refused(throttle)
    assert throttle.limit == 32
    world.time += SETTLING
    refused(throttle)
    assert throttle.limit == 16


def test_it_never_gets_none_and_recovers_slowly() -> None:
    world = FakeTime()
    throttle = Throttle(4, world.now)
    for _ in range(10):
        world.time += SETTLING
        refused(throttle)
    assert throttle.limit == 1
    turns = 0
    while throttle.limit < 4:
        with throttle.turn():
            turns += 1
    assert turns == pytest.approx(1 + 2 + 3, abs=3)
    with throttle.turn():
        pass
    assert throttle.limit == 4


def test_other_failures_teach_nothing() -> None:
    throttle = Throttle(8)
    refused(throttle, StoreUnreachable("down"))
    assert throttle.limit == 8
