"""Turns for requests: never more than the store bears, and more again when it bears more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from runner.errors import StoreBusy, StoreUnreachable
from runner.storage.throttle import SETTLING, Throttle
from tests.supervisor.sessions import wait_for

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
    throttle, inside, go = Throttle(3), list[int](), threading.Event()

    def request(number: int) -> None:
        with throttle.turn():
            inside.append(number)
            assert go.wait(20)

    with ThreadPoolExecutor(9) as pool:
        requests = [pool.submit(request, number) for number in range(9)]
        try:
            wait_for(lambda: len(inside) >= 3)
            time.sleep(0.2)  # for those that must not come
            assert len(inside) == 3
        finally:
            go.set()
        for one in requests:
            one.result()
    assert sorted(inside) == list(range(9))


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
    assert turns == 7  # one more after each round: 1, then 2, then 3 and a bit
    with throttle.turn():
        pass
    assert throttle.limit == 4


def test_other_failures_teach_nothing() -> None:
    throttle = Throttle(8)
    refused(throttle, StoreUnreachable("down"))
    assert throttle.limit == 8
