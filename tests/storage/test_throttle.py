"""Turns for requests: never more than the store bears, and more again when it bears more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from runner.errors import StoreBusy, StoreUnreachable
from runner.storage.buffers import Buffers
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


class Woken(threading.Condition):
    """Counts how many waiters are woken."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.counts: list[int] = []

    def notify(self, n: int = 1) -> None:
        self.counts.append(n)
        super().notify(n)


def test_who_ends_wakes_as_many_as_there_are_free_turns() -> None:
    """Not all that wait: of those, all but one would find nothing."""
    throttle = Throttle(4)
    throttle._changed = woken = Woken()
    for _ in range(4):
        throttle.begin()
    for outcome in (None, StoreBusy, None, None):  # four at once, then two, and slowly more
        throttle.end(outcome)
    assert throttle.limit == 2
    assert woken.counts == [1, 0, 1, 2]


def test_every_turn_is_used_by_many_that_fight_for_few() -> None:
    throttle, done = Throttle(3), list[int]()

    def request(number: int) -> None:
        for _ in range(200):
            with throttle.turn():
                time.sleep(0)
        done.append(number)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(16))


def test_who_waits_gives_up_when_it_is_over() -> None:
    over, throttle_is_full = threading.Event(), threading.Event()
    throttle = Throttle(1, over.is_set)
    failures: list[StoreUnreachable] = []

    def wait_in_vain() -> None:
        throttle_is_full.wait()
        try:
            throttle.begin()
        except StoreUnreachable as error:
            failures.append(error)

    waiter = threading.Thread(target=wait_in_vain)
    waiter.start()
    with throttle.turn():
        throttle_is_full.set()
        time.sleep(0.1)
        assert failures == []
        over.set()
        waiter.join(20)
        assert len(failures) == 1
    with throttle.turn():  # it is still in order: who need not wait may go
        pass


def test_a_wait_for_memory_ends_as_well() -> None:
    over = threading.Event()
    buffers = Buffers(1, over.is_set)
    block = buffers.take(10)
    over.set()
    with pytest.raises(StoreUnreachable):
        buffers.take(10)
    buffers.give_back(block)
    assert len(buffers.take(10)) == 10


def test_a_busy_store_gets_half_as_many_once_for_all_that_were_under_way() -> None:
    world = FakeTime()
    throttle = Throttle(64, now=world.now)
    for _ in range(10):
        refused(throttle)
    assert throttle.limit == 32
    world.time += SETTLING
    refused(throttle)
    assert throttle.limit == 16


def test_it_never_gets_none_and_recovers_slowly() -> None:
    world = FakeTime()
    throttle = Throttle(4, now=world.now)
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
