"""Retries: what is tried again, for how long, and what is said about it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import (
    AccessDenied,
    CloudrunError,
    DiskFull,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    SourceChanged,
    StoreUnreachable,
)
from runner.storage.api import ObjectInfo
from runner.storage.memory import Fault, FaultPlan, MemoryStore
from runner.storage.retrying import Retry, RetryingStore
from runner.storage.waiting import LOOK

DOWN = StoreUnreachable("down")


class FakeTime:
    """A clock and its sleep."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.time += seconds


def failing(times: int, fault: Fault, operation: str = "") -> FaultPlan:
    return lambda asked, _key, nth: fault if nth < times and operation in ("", asked) else None


def retrying(store: MemoryStore, world: FakeTime, give_up_after: float = 600) -> RetryingStore:
    return RetryingStore(store, Retry(give_up_after, clock=world, sleep=world.sleep))


@pytest.mark.parametrize("operation", ["read", "write", "only_new", "list", "download", "upload", "delete"])
def test_every_operation_is_tried_again(tmp_path: Path, operation: str) -> None:
    world = FakeTime()
    store = retrying(MemoryStore(failing(4, Fault(DOWN)), objects={"k": b"x"}), world)
    source = tmp_path / "source"
    source.write_bytes(b"y")
    match operation:
        case "read":
            assert store.read("k") == b"x"
        case "write":
            assert store.write("k", b"z").size == 1
        case "only_new":
            assert store.write("new", b"z", only_new=True).size == 1
        case "list":
            assert [info.key for info in store.list()] == ["k"]
        case "download":
            store.download("k", tmp_path / "copy")
        case "upload":
            store.upload(source, "k")
        case "delete":
            store.delete(iter(["k"]))
    assert len(world.slept) == 4


@pytest.mark.parametrize(
    "error", [AccessDenied("no"), ObjectMissing("no"), DiskFull("no"), SourceChanged("no"), ObjectChanged("no")]
)
def test_what_cannot_help_is_not_tried(error: CloudrunError) -> None:
    world = FakeTime()
    store = retrying(MemoryStore(failing(1, Fault(error)), objects={"k": b"x"}), world)
    with pytest.raises(type(error)):
        store.read("k")
    assert world.slept == []


def test_errors_that_are_not_ours_pass() -> None:
    class Bug(MemoryStore):
        def read(self, key: str) -> bytes:
            raise ZeroDivisionError

    world = FakeTime()
    with pytest.raises(ZeroDivisionError):
        retrying(Bug(), world).read("k")
    assert world.slept == []


def test_a_changed_object_is_fetched_again_only_when_any_version_will_do(tmp_path: Path) -> None:
    world = FakeTime()
    memory = MemoryStore(failing(2, Fault(ObjectChanged("changed"))), objects={"k": b"x"})
    with pytest.raises(ObjectChanged):
        retrying(memory, world).download("k", tmp_path / "copy", version="1")
    assert world.slept == []
    retrying(memory, world).download("k", tmp_path / "copy")
    assert len(world.slept) == 1


def test_each_retry_is_told() -> None:
    told: list[tuple[str, CloudrunError, float]] = []
    world = FakeTime()
    store = RetryingStore(
        MemoryStore(failing(3, Fault(DOWN)), objects={"k": b""}),
        Retry(600, on_retry=lambda *one: told.append(one), clock=world, sleep=world.sleep),
    )
    store.read("k")
    assert [wait for _, _, wait in told] == world.slept
    assert {(operation, error) for operation, error, _ in told} == {("read", DOWN)}


def test_a_listing_starts_again_as_a_whole() -> None:
    world = FakeTime()
    objects = {f"k{number}": b"" for number in range(5)}
    store = retrying(MemoryStore(failing(2, Fault(DOWN, cut=3)), objects=objects), world)
    assert [info.key for info in store.list()] == sorted(objects)


def test_a_listing_that_never_completes_yields_nothing() -> None:
    world, seen = FakeTime(), list[ObjectInfo]()
    store = retrying(MemoryStore(failing(10**6, Fault(DOWN, cut=3)), objects={"a": b""}), world, 10)
    with pytest.raises(StoreUnreachable):
        seen.extend(store.list())
    assert seen == []


@settings(deadline=None)
@given(give_up_after=st.floats(0, 5000), patience_of_a_call=st.floats(0, 100))
def test_it_never_sleeps_beyond_the_deadline(give_up_after: float, patience_of_a_call: float) -> None:
    world = FakeTime()

    def down(_operation: str, _key: str, _nth: int) -> Fault:
        return Fault(DOWN, delay=patience_of_a_call)

    store = RetryingStore(
        MemoryStore(down, sleep=lambda seconds: setattr(world, "time", world.time + seconds)),
        Retry(give_up_after, clock=world, sleep=world.sleep),
    )
    with pytest.raises(StoreUnreachable):
        store.read("k")
    first_failure = 1000.0 + patience_of_a_call
    # The last try may begin at the deadline, never later.
    assert world.time <= first_failure + give_up_after + patience_of_a_call + 1e-6
    assert sum(world.slept) <= give_up_after + 1e-6


@settings(deadline=None)
@given(failures=st.integers(0, 12), give_up_after=st.floats(400, 5000))
def test_a_store_that_comes_back_in_time_is_no_failure(failures: int, give_up_after: float) -> None:
    world = FakeTime()
    store = retrying(MemoryStore(failing(failures, Fault(DOWN)), objects={"k": b"x"}), world, give_up_after)
    assert store.read("k") == b"x"
    assert len(world.slept) == failures
    assert all(wait <= 30 for wait in world.slept)


def test_no_patience_means_one_try() -> None:
    world = FakeTime()
    with pytest.raises(StoreUnreachable):
        retrying(MemoryStore(failing(1, Fault(DOWN))), world, 0).write("k", b"x")
    assert world.slept == []


def test_our_own_write_that_landed_is_known_again() -> None:
    world = FakeTime()
    memory = MemoryStore(failing(1, Fault(DOWN, landed=True), "write"))
    info = retrying(memory, world).write("k", b"nonce-1", only_new=True)
    assert info == next(memory.list("k"))


def test_another_write_that_landed_first_is_not_ours() -> None:
    world = FakeTime()
    memory = MemoryStore(failing(1, Fault(DOWN), "write"), objects={"k": b"theirs"})
    with pytest.raises(ObjectExists):
        retrying(memory, world).write("k", b"ours", only_new=True)
    assert memory.read("k") == b"theirs"


def test_a_first_try_that_finds_the_key_taken_is_not_read_back() -> None:
    memory = MemoryStore(objects={"k": b"same"})
    with pytest.raises(ObjectExists):
        retrying(memory, FakeTime()).write("k", b"same", only_new=True)


def test_a_read_back_that_fails_is_tried_again_too() -> None:
    world = FakeTime()

    def plan(operation: str, _key: str, nth: int) -> Fault | None:
        return Fault(DOWN, landed=operation == "write") if nth == 0 else None

    assert retrying(MemoryStore(plan), world).write("k", b"nonce", only_new=True).size == 5
    assert len(world.slept) == 3


def test_a_stop_ends_the_wait_with_the_last_error() -> None:
    stop = threading.Event()
    calls: list[int] = []

    def plan(_operation: str, _key: str, nth: int) -> Fault:
        calls.append(nth)
        return Fault(DOWN)

    def stop_at_the_third(_operation: str, _error: CloudrunError, _wait: float) -> None:
        if len(calls) == 3:
            stop.set()

    store = RetryingStore(MemoryStore(plan), Retry(3600, stop=stop, on_retry=stop_at_the_third))
    with pytest.raises(StoreUnreachable):
        store.read("k")
    assert calls == [0, 1, 2]
    with pytest.raises(StoreUnreachable):
        store.read("k")
    assert calls == [0, 1, 2, 3]


def test_a_stop_wakes_who_waits() -> None:
    stop = threading.Event()
    world = FakeTime()

    def told_in_mid_sleep(_seconds: float) -> None:
        stop.set()

    calls: list[int] = []

    def plan(_operation: str, _key: str, nth: int) -> Fault:
        calls.append(nth)
        return Fault(DOWN)

    store = RetryingStore(MemoryStore(plan), Retry(3600, stop=stop, clock=world, sleep=told_in_mid_sleep))
    with pytest.raises(StoreUnreachable):
        store.read("k")
    assert calls == [0]


def test_a_deadline_shortens_what_is_left() -> None:
    world, ends = FakeTime(), [1e9]

    def plan(_operation: str, _key: str, nth: int) -> Fault:
        if nth == 2:
            ends[0] = world.time + 5
        return Fault(DOWN)

    retry = Retry(3600, deadline=lambda: ends[0], clock=world, sleep=world.sleep)
    with pytest.raises(StoreUnreachable):
        RetryingStore(MemoryStore(plan), retry).read("k")
    assert world.time <= ends[0]


class Passing(threading.Event):
    """A stop that nobody asks for; waiting for it takes no time but that of the world."""

    def __init__(self, world: FakeTime) -> None:
        super().__init__()
        self._world = world

    def wait(self, timeout: float | None = None) -> bool:
        self._world.sleep(timeout or 0.0)
        return self.is_set()


def test_a_deadline_that_comes_during_a_wait_ends_it() -> None:
    """A notice gives two minutes, or twenty seconds: nobody may sleep through them."""
    world, notice = FakeTime(), list[float]()

    def comes_in_the_midst_of_a_long_wait(_operation: str, _error: CloudrunError, wait: float) -> None:
        if wait > 10 and not notice:
            notice.append(world.time + 2.0)

    def deadline() -> float:
        return notice[0] + 3.0 if notice and world.time >= notice[0] else 1e9

    retry = Retry(1e6, on_retry=comes_in_the_midst_of_a_long_wait, deadline=deadline, clock=world, stop=Passing(world))
    store = MemoryStore(failing(10**6, Fault(DOWN)))
    with pytest.raises(StoreUnreachable):
        RetryingStore(store, retry).read("k")
    assert world.time == pytest.approx(notice[0] + 3.0, abs=LOOK)
    assert retry.is_over()


def test_a_wait_is_as_long_as_was_told() -> None:
    world, told = FakeTime(), list[float]()
    retry = Retry(3600, on_retry=lambda _operation, _error, wait: told.append(wait), clock=world, stop=Passing(world))
    store = RetryingStore(MemoryStore(failing(12, Fault(DOWN)), objects={"k": b"x"}), retry)
    assert store.read("k") == b"x"
    assert world.time - 1000.0 == pytest.approx(sum(told))
    assert max(world.slept) <= LOOK
    assert not retry.is_over()


def test_a_deadline_that_has_passed_allows_no_second_try() -> None:
    world, calls = FakeTime(), list[int]()

    def plan(_operation: str, _key: str, nth: int) -> Fault:
        calls.append(nth)
        return Fault(DOWN)

    retry = Retry(3600, deadline=lambda: world.time - 1.0, clock=world, stop=Passing(world))
    with pytest.raises(StoreUnreachable):
        RetryingStore(MemoryStore(plan), retry).read("k")
    assert calls == [0]
    assert world.slept == []


def test_a_replacement_whose_answer_was_lost_is_known_again() -> None:
    world = FakeTime()
    memory = MemoryStore(
        lambda operation, _key, nth: Fault(DOWN, landed=True) if (operation, nth) == ("write", 1) else None
    )
    first = memory.write("k", b"first")
    info = retrying(memory, world).write("k", b"second", replacing=first.version)
    assert memory.look("k") == (b"second", info.version)
    with pytest.raises(ObjectChanged):
        retrying(memory, world).write("k", b"third", replacing=first.version)
