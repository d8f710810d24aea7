"""History and its way to the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.layout import LocalLayout, StoreLayout, attempt_name
from runner.clock import SystemClock
from runner.core.record import Line
from runner.errors import StoreUnreachable
from runner.storage.memory import Fault, MemoryStore
from runner.supervisor.history import journal_lines, local_segments
from runner.supervisor.journal import Journal
from runner.supervisor.lease import LeaseGone
from runner.supervisor.shipper import Shipper
from tests.supervisor.sessions import wait_for

KEYS = StoreLayout("job")


@pytest.fixture
def local(tmp_path: Path) -> LocalLayout:
    return LocalLayout(tmp_path / "state", tmp_path / "cache", "job", "memory://")


def line(at: float, kind: str = "Noticed", phase: str = "running", **event: object) -> Line:
    ledger = {"run": 1, "attempt": 1, "stored": [], "local": [], "rejected": []}
    return {
        "at": at,
        "event": {"type": kind, **event},
        "state": {"phase": phase, "details": {"ending": {"outcome": "stopped"}}, "ledger": ledger},
    }


def record(local: LocalLayout, session: str, attempt: int, *lines: Line) -> None:
    journal = Journal(lambda run, attempt, n: local.journal_segment(run, attempt_name(attempt, session), n))
    for one in lines:
        journal.write(one, 1, attempt, durable=False)
    journal.close()


def stored(session: str, attempt: int, *lines: Line) -> dict[str, bytes]:
    text = "".join(json.dumps(one) + "\n" for one in lines)
    return {KEYS.journal_segment(1, attempt_name(attempt, session), 1): text.encode()}


def ship(
    local: LocalLayout, store: MemoryStore, every: float = 0.05, complain: Callable[[str], None] = print
) -> Shipper:
    shipper = Shipper(store, local, "aaaaaa", every=every, clock=SystemClock(), complain=complain)
    shipper.start()
    return shipper


def contents(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list()}


def test_history_is_in_the_order_of_attempts_from_the_disk_and_the_store(local: LocalLayout) -> None:
    record(local, "bbbbbb", 2, line(50.0))
    record(local, "bbbbbb", 10, line(60.0))
    store = MemoryStore(objects={**stored("cccccc", 1, line(99.0)), **stored("bbbbbb", 2, line(0.0))})
    assert [one["at"] for one in journal_lines(store, local, 1)] == [99.0, 50.0, 60.0], "this disk's copy counts"
    assert [one["at"] for one in journal_lines(None, local, 1)] == [50.0, 60.0]
    assert [one["at"] for one in journal_lines(store, local, 1, without="bbbbbb")] == [99.0]


def test_sessions_that_share_an_attempt_are_in_the_order_of_time(local: LocalLayout) -> None:
    record(local, "ffffff", 3, line(10.0), line(11.0))
    record(local, "aaaaaa", 3, line(30.0))
    record(local, "cccccc", 3, line(20.0))
    assert [one["at"] for one in journal_lines(None, local, 1)] == [10.0, 11.0, 20.0, 30.0]


def test_journal_logs_and_status_are_carried_to_the_store(local: LocalLayout) -> None:
    store = MemoryStore(objects=stored("cccccc", 1, line(1.0, "Started", per_hour=1.0)))
    shipper = ship(local, store)
    log = local.log_segment(1, "a2-aaaaaa", 1)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"step 1\n")
    record(local, "aaaaaa", 2, line(5.0, "Started", per_hour=1.0))
    shipper.record(line(5.0, "Started", per_hour=1.0), 1, urgent=True)
    wait_for(lambda: KEYS.log_segment(1, "a2-aaaaaa", 1) in contents(store))
    log.write_bytes(b"step 1\nstep 2\n")
    shipper.record(line(9.0, phase="finished"), 1, urgent=True)
    shipper.close(5.0)
    there = contents(store)
    assert there[KEYS.log_segment(1, "a2-aaaaaa", 1)] == b"step 1\nstep 2\n"
    segment = local_segments(local, 1, "journal")
    assert there[KEYS.journal_segment(1, "a2-aaaaaa", 1)] == next(iter(segment.values())).read_bytes()
    told = json.loads(there[KEYS.status()])
    assert (told["phase"], told["alive"]) == ("finished", False)
    assert told["restarts"]["preemptions"] == 1, "the earlier session never got to say how it ended"


def test_what_an_earlier_session_could_not_store_is_stored_now_and_nothing_twice(local: LocalLayout) -> None:
    writes: list[str] = []

    def watch(operation: str, key: str, _nth: int) -> Fault | None:
        if operation == "write":
            writes.append(key)
        return None

    record(local, "bbbbbb", 1, line(1.0))
    old = next(iter(local_segments(local, 1, "journal").values())).read_bytes()
    here = KEYS.journal_segment(1, "a1-cccccc", 1)
    record(local, "cccccc", 1, line(2.0))
    store = MemoryStore(watch, objects=stored("cccccc", 1, line(2.0)))
    shipper = ship(local, MemoryStore(watch, objects={**contents(store), here: old.replace(b"1.0", b"2.0")}))
    shipper.record(line(3.0), 1, urgent=True)
    shipper.close(5.0)
    assert writes.count(KEYS.journal_segment(1, "a1-bbbbbb", 1)) == 1
    assert here not in writes


def away_at_first(operation: str, key: str, nth: int) -> Fault | None:
    return Fault(StoreUnreachable("away")) if operation == "list" and key.endswith("journal/") and nth < 3 else None


def test_a_store_that_is_away_is_complained_of_once_and_caught_up_with(local: LocalLayout) -> None:
    complaints: list[str] = []
    store = MemoryStore(away_at_first)
    shipper = ship(local, store, complain=complaints.append)
    record(local, "aaaaaa", 1, line(1.0, "Started"), line(2.0))
    shipper.record(line(1.0, "Started"), 1, urgent=True)
    shipper.record(line(2.0), 1, urgent=False)
    wait_for(lambda: KEYS.status() in contents(store))
    shipper.close(5.0)
    assert len(complaints) == 1
    assert "away" in complaints[0]
    assert json.loads(contents(store)[KEYS.status()])["heard_at"] == 2.0, "no line was lost"


def test_foreign_lines_in_the_store_do_not_end_the_shipping(local: LocalLayout) -> None:
    foreign = {"at": 1.0, "event": {"type": "TrainerStarted"}}
    store = MemoryStore(objects=stored("cccccc", 1, line(0.5, "Started"), foreign))
    shipper = ship(local, store)
    shipper.record(line(2.0, "Started"), 1, urgent=True)
    wait_for(lambda: KEYS.status() in contents(store))
    shipper.close(5.0)


def test_a_fault_of_our_own_does_not_end_the_shipping(local: LocalLayout) -> None:
    complaints: list[str] = []
    store = MemoryStore()
    shipper = ship(local, store, complain=complaints.append)
    path = local.journal_segment(1, "a1-bbbbbb", 1)
    path.mkdir(parents=True)  # a folder where a file should be
    shipper.record(line(1.0, "Started"), 1, urgent=True)
    wait_for(lambda: complaints)
    path.rmdir()
    wait_for(lambda: KEYS.status() in contents(store))
    shipper.close(5.0)


def test_closing_waits_no_longer_than_it_was_told(local: LocalLayout) -> None:
    store = MemoryStore(lambda *_: Fault(delay=3.0))
    shipper = ship(local, store)
    shipper.record(line(1.0, "Started"), 1, urgent=True)
    began = SystemClock().now()
    shipper.close(0.2)
    assert SystemClock().now() - began < 2.0


def test_who_has_lost_the_lease_ships_nothing_and_complains_of_nothing(local: LocalLayout) -> None:
    complaints: list[str] = []
    gone = MemoryStore(lambda operation, *_: Fault(LeaseGone("lost")) if operation == "write" else None)
    shipper = ship(local, gone, complain=complaints.append)
    record(local, "aaaaaa", 1, line(1.0, "Started"))
    shipper.record(line(1.0, "Started"), 1, urgent=True)
    shipper.close(5.0)
    assert complaints == []
    store = MemoryStore()
    shipper = ship(local, store)
    shipper.record(line(1.0, "Started"), 1, urgent=False)
    shipper.record(line(2.0, "LeaseLost"), 0, urgent=True)
    shipper.close(5.0)
    assert contents(store) == {}


def test_nothing_is_shipped_before_the_run_is_known(local: LocalLayout) -> None:
    store = MemoryStore()
    shipper = ship(local, store)
    shipper.record(line(1.0), 0, urgent=True)
    shipper.close(5.0)
    assert contents(store) == {}
