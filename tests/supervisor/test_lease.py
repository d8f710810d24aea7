"""One lease, several machines, real threads: who may write is never in doubt to himself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.core.events import LeaseHeld, LeaseLost, LeaseTaken, Noticed, StandbyChanged
from runner.errors import ObjectMissing, StoreUnreachable, UsageError
from runner.storage.api import ObjectStore
from runner.storage.folder import FolderStore
from runner.storage.memory import Fault, MemoryStore
from runner.storage.retrying import Retry
from runner.supervisor.fence import FencedStore
from runner.supervisor.lease import LeaseGone, LeaseInDoubt, LeasePlace
from runner.supervisor.lease_body import (
    PERIOD,
    Body,
    Note,
    Waiter,
    parse_body,
    read_body,
    read_note,
    sign_note,
    write_note,
)
from runner.supervisor.lease_protocol import Tenure
from tests.supervisor.machines import KEY, Machine, written
from tests.supervisor.sessions import wait_for

Make = Callable[..., Machine]
NEVER = 3600.0
"""Seconds: a period that no test outlives."""


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")


@pytest.fixture
def make(store: ObjectStore, tmp_path: Path) -> Iterator[Make]:
    made: list[Machine] = []

    def new(name: str, period: float = 1.0, **options: object) -> Machine:
        made.append(Machine(store, tmp_path / "disks", name, period, **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for one in made:
        one.line.open.set()
        one.keeper.close(5.0)


def refusal(machine: Machine) -> str:
    """What stands in the way of writing; empty when nothing does."""
    try:
        machine.keeper.check()
    except (LeaseGone, LeaseInDoubt) as error:
        return type(error).__name__
    return ""


def test_the_first_one_has_it_and_the_second_hears_who_that_is(make: Make, store: ObjectStore) -> None:
    a, b = make("a").take(), make("b").take()
    assert a.posted[:1] == [LeaseTaken("session of a", "a", 1)]
    (held,) = b.posted
    assert isinstance(held, LeaseHeld)
    assert (held.holder, held.host, held.epoch) == ("session of a", "a", 1)
    assert (refusal(a), refusal(b)) == ("", "LeaseGone")
    told = json.loads(store.read(KEY))
    assert {"version", "holder", "host", "epoch", "period", "renewed", "released", "standby", "at"} == set(told)


def test_it_is_renewed_and_nobody_else_gets_it(make: Make, store: ObjectStore) -> None:
    a, b = make("a", 0.5).take(), make("b", 0.5).take()
    wait_for(lambda: written(store).renewed > 12)
    assert refusal(a) == ""
    assert not b.has_it()
    assert not a.posted.of(LeaseLost)


def test_who_waits_is_known_to_the_holder_until_he_has_gone(make: Make) -> None:
    a, b = make("a", 0.4).take(), make("b", 0.4).take()
    wait_for(lambda: a.posted.of(StandbyChanged))
    assert a.posted.of(StandbyChanged) == [StandbyChanged(("b",))]
    b.keeper.close(5.0)
    wait_for(lambda: len(a.posted.of(StandbyChanged)) == 2)
    assert a.posted.of(StandbyChanged)[1] == StandbyChanged(())


def test_a_released_lease_is_taken_at_once(make: Make, store: ObjectStore) -> None:
    a, b = make("a", NEVER).take(), make("b", NEVER).take()
    a.keeper.close(5.0)
    assert written(store).released
    assert refusal(a) == "LeaseGone"
    assert b.posted.wait(LeaseTaken) == LeaseTaken("session of b", "b", 2)
    assert not a.posted.of(LeaseLost), "it was let go of, not lost"


def test_a_dead_holder_is_followed_after_it_has_stopped_writing(make: Make) -> None:
    a, b = make("a").take(), make("b").take()
    wait_for(lambda: a.posted.of(StandbyChanged))
    a.die()
    wrote_at = time.monotonic()
    while not b.has_it():
        if refusal(a) == "":
            wrote_at = time.monotonic()
            assert not b.has_it(), "two may write"
    assert b.posted.wait(LeaseTaken).epoch == 2
    assert time.monotonic() - wrote_at > 0.1, "a good part of the period lies between"
    lost = a.posted.wait(LeaseLost)
    assert "b will take over" in lost.reason
    assert refusal(a) == "LeaseGone"


def test_a_holder_whose_requests_never_return_stops_all_the_same(make: Make) -> None:
    a, b = make("a").take(), make("b").take()
    wait_for(lambda: a.posted.of(StandbyChanged))
    a.line.open.clear()
    assert "no answer" in a.posted.wait(LeaseLost).reason
    b.posted.wait(LeaseTaken)
    assert refusal(a) == "LeaseGone"


def test_with_nobody_waiting_training_goes_on_but_nothing_is_written(make: Make) -> None:
    a = make("a", 0.4).take()
    a.die()
    wait_for(lambda: refusal(a) == "LeaseInDoubt")
    told = a.posted.wait(Noticed)
    assert "nothing is stored until it is" in told.text
    time.sleep(0.8)
    assert not a.posted.of(LeaseLost)
    a.line.cut = False
    wait_for(lambda: refusal(a) == "")
    wait_for(lambda: len(a.posted.of(Noticed)) == 2)
    assert a.posted.of(Noticed)[1].text == "the lease answers again"


def test_a_holder_that_was_away_finds_that_another_one_has_taken_over(make: Make) -> None:
    a = make("a", 0.4).take()
    a.die()
    b = make("b", 0.4).take()
    b.posted.wait(LeaseTaken)
    assert refusal(a) == "LeaseInDoubt", "it has not heard of it"
    a.line.cut = False
    assert a.posted.wait(LeaseLost).reason == "another machine has taken over: b"
    assert refusal(a) == "LeaseGone"
    renewed = len(b.posted)
    time.sleep(0.5)
    assert len(b.posted) == renewed, "what the old holder does is no matter to the new one"


def test_of_many_that_wait_one_gets_it(make: Make, store: ObjectStore) -> None:
    a = make("a", 2.0).take()
    waiting = [make(f"w{number}", 2.0).take() for number in range(8)]
    a.keeper.close(5.0)
    wait_for(lambda: any(one.has_it() for one in waiting))
    time.sleep(0.5)
    assert sum(one.has_it() for one in waiting) == 1
    assert written(store).epoch == 2


def test_the_same_machine_does_not_wait_for_its_own_dead_supervisor(make: Make) -> None:
    make("a", NEVER, session="first").take().die()
    again = make("a", NEVER, session="second").take()
    assert again.posted == [LeaseTaken("second", "a", 2)]


def test_a_disk_that_two_machines_share_proves_nothing(make: Make, tmp_path: Path) -> None:
    make("a", NEVER).take()
    b = make("b", NEVER)
    sign_note(tmp_path / "disks/b.json", "session of a", "a")
    b.take()
    assert not b.has_it()


def test_a_standby_does_not_begin_what_nobody_has_begun(make: Make) -> None:
    b = make("b", NEVER, may_begin=False).take()
    assert [(told.holder, told.host) for told in b.posted.of(LeaseHeld)] == [("", "")]
    a = make("a", NEVER).take()
    assert a.has_it()
    wait_for(lambda: len(b.posted.of(LeaseHeld)) == 2)
    a.keeper.close(5.0)
    b.posted.wait(LeaseTaken)


def test_a_standby_follows_one_that_has_left_before_it_came(make: Make) -> None:
    make("a", NEVER).take().keeper.close(5.0)
    assert make("b", NEVER, may_begin=False).take().has_it()


def test_a_store_without_conditions_has_no_lease_and_says_so(make: Make, store: ObjectStore) -> None:
    a = make("a", exclusive=False).take()
    assert a.posted[1:] == [LeaseTaken("session of a", "a", 0)]
    assert "no conditional writes" in a.posted.of(Noticed)[0].text
    assert refusal(a) == ""
    assert read_body(store, KEY) is None
    assert a.keeper.epoch_above(4) == 4, "level with what is stored: the higher step wins"
    with pytest.raises(UsageError, match="no conditional writes"):
        make("b", exclusive=False, may_begin=False).take()


def test_a_lease_that_somebody_deletes_is_lost(make: Make, store: ObjectStore) -> None:
    a = make("a", 0.4).take()
    store.delete([KEY])
    assert "deleted" in a.posted.wait(LeaseLost).reason
    assert refusal(a) == "LeaseGone"


def test_a_holder_that_was_dead_before_anybody_looked_is_waited_for_by_his_own_period(
    make: Make, store: ObjectStore
) -> None:
    store.write(KEY, Body("x", "an old machine", 7, 0.5, 0.0).to_bytes())
    a = make("a", NEVER).take()
    assert isinstance(a.posted[0], LeaseHeld)
    assert a.posted.wait(LeaseTaken).epoch == 8


def test_the_epoch_stands_above_all_that_is_stored(make: Make, store: ObjectStore) -> None:
    a = make("a", 0.4).take()
    assert a.keeper.epoch_above(0) == 1
    assert a.keeper.epoch_above(7) == 8, "the lease was deleted since"
    wait_for(lambda: written(store).epoch == 8)
    a.keeper.close(5.0)
    assert make("b").take().posted == [LeaseTaken("session of b", "b", 9)]


def lost_answers(operation: str, key: str, nth: int) -> Fault | None:
    return Fault(StoreUnreachable("the answer is lost"), landed=True) if operation == "write" and nth % 3 == 0 else None


def test_answers_that_get_lost_cost_nobody_the_lease(tmp_path: Path) -> None:
    store = MemoryStore(lost_answers)
    a = Machine(store, tmp_path, "a", 0.8).take()
    a.posted.wait(LeaseTaken)
    wait_for(lambda: written(store).renewed > 15)
    assert not a.posted.of(LeaseLost)
    assert refusal(a) == ""
    a.keeper.close(5.0)


def test_a_renewal_whose_answer_was_lost_is_not_written_a_second_time_as_it_was() -> None:
    """Who waits has seen the first one: it must not pass for the sign of life that the second one is."""
    lost: list[Fault] = []
    store = MemoryStore(lambda operation, _key, _nth: lost.pop() if lost and operation == "write" else None)
    place = LeasePlace(store, KEY, Waiter("x", "a"), NEVER)
    held = place.write(Body("x", "a", 1, NEVER, 0.0), None)
    assert held is not None
    tenure = Tenure(place, held)
    lost.append(Fault(StoreUnreachable("the answer is lost"), landed=True))
    with pytest.raises(StoreUnreachable):
        tenure.renew()
    seen = written(store).renewed
    assert tenure.renew() == ""
    assert written(store).renewed > seen > 0


def test_the_first_question_is_asked_with_patience(tmp_path: Path) -> None:
    store = MemoryStore(lambda _operation, _key, nth: Fault(StoreUnreachable("away")) if nth < 1 else None)
    a = Machine(store, tmp_path, "a").take()
    assert a.has_it()
    a.keeper.close(5.0)
    away = Machine(MemoryStore(lambda *_: Fault(StoreUnreachable("away"))), tmp_path, "b")
    with pytest.raises(StoreUnreachable):
        away.take()


def test_after_a_release_it_can_be_asked_for_again(make: Make) -> None:
    a = make("a", NEVER).take()
    a.keeper.close(5.0)
    a.take()
    assert a.posted == [LeaseTaken("session of a", "a", 1), LeaseTaken("session of a", "a", 2)]
    assert refusal(a) == ""


# -- what is fenced ----------------------------------------------------------------------------------------------------


def fenced(machine: Machine, store: ObjectStore) -> FencedStore:
    return FencedStore(store, store, machine.keeper, Retry(0.2))


def test_only_the_holder_writes(make: Make, store: ObjectStore, tmp_path: Path) -> None:
    a, b = make("a", NEVER).take(), make("b", NEVER).take()
    fenced(a, store).write("job/x", b"by a")
    file = tmp_path / "file"
    file.write_bytes(b"data")
    refused: list[Callable[[FencedStore], object]] = [
        lambda one: one.write("job/x", b"by b"),
        lambda one: one.write("job/y", b"", only_new=True),
        lambda one: one.delete(["job/x"]),
        lambda one: one.upload(file, "job/z"),
        lambda one: one.copy("job/x", "job/z"),
    ]
    for change in refused:
        with pytest.raises(LeaseGone):
            change(fenced(b, store))
    assert fenced(b, store).read("job/x") == b"by a"
    assert sorted(info.key for info in store.list("job/")) == ["job/lease.json", "job/x"]
    fenced(a, store).delete(["job/x"])
    with pytest.raises(ObjectMissing):
        store.read("job/x")


def test_what_waits_for_its_commit_goes_on_in_doubt_and_the_commit_waits(
    make: Make, store: ObjectStore, tmp_path: Path
) -> None:
    a = make("a", 0.4).take()
    a.die()
    wait_for(lambda: refusal(a) == "LeaseInDoubt")
    file = tmp_path / "file"
    file.write_bytes(b"data")
    fenced(a, store).upload(file, "job/z")
    with pytest.raises(LeaseInDoubt):
        fenced(a, store).write("job/x", b"too late")
    heal = threading.Timer(0.2, lambda: setattr(a.line, "cut", False))
    heal.start()
    FencedStore(store, store, a.keeper, Retry(20.0)).write("job/x", b"in time again")
    assert store.read("job/x") == b"in time again"


# -- what is written down ----------------------------------------------------------------------------------------------


def test_a_body_is_read_as_it_was_written() -> None:
    body = Body("x", "a", 3, 30.0, 5.5, 12, released=True, standby=(Waiter("y", "b", 2),))
    assert parse_body(body.to_bytes()) == body


GOOD = json.loads(Body("x", "a", 3, 30.0, 5.5).to_bytes())


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"7", b"null", b"\xff", b"[" * 100_000,
        *(json.dumps({key: GOOD[key] for key in GOOD if key != gone}).encode() for gone in GOOD if gone != "version"),
        json.dumps(GOOD | {"standby": 7}).encode(),
        json.dumps(GOOD | {"standby": [7]}).encode(),
        json.dumps(GOOD | {"epoch": "x"}).encode(),
        json.dumps(GOOD | {"epoch": -1}).encode(),
        json.dumps(GOOD | {"epoch": 10**30}).encode(),
        json.dumps(GOOD | {"epoch": 1e999}).encode(),
        json.dumps(GOOD | {"period": 1e999}).encode(),
        json.dumps(GOOD | {"period": 0}).encode(),
        json.dumps(GOOD | {"at": 1e999}).encode(),
    ],
)  # fmt: skip
def test_whatever_lies_there_is_a_lease_that_expires(data: bytes) -> None:
    body = parse_body(data)
    assert (body.period, body.epoch, body.at, body.released) == (PERIOD, 0, 0.0, False)


def test_the_note_of_a_session_keeps_what_was_said_of_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    assert read_note(path) == Note()
    note = Note("x", "a", 3, (2, 50), {"signature": 1})
    write_note(path, note)
    assert read_note(path) == note
    sign_note(path, "y", "b")
    assert read_note(path) == Note("y", "b", 3, (2, 50), {"signature": 1})


NO_BASE = '{"holder": "x", "host": "a", "epoch": 1, "base": [], "leftovers": {}}'


@pytest.mark.parametrize("text", ["", "[]", "{}", NO_BASE])
def test_half_a_note_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert read_note(tmp_path / "note") == Note()
