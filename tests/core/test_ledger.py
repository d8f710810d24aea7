"""What a run has cost and where it stands, from lines written by hand."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from runner.core import ledger as account_of
from runner.core.ledger import Account, fold, history, status
from runner.core.record import Line, plain, redacted
from runner.core.state import NO_HISTORY, Alarm, Cadence, History, Ledger, Losses, Saves, Trend, Uploads


def checkpoint(step: int, time: float, *, local: bool = False) -> Line:
    name = f"step-{step}"
    id_ = f"local:{name}" if local else f"{name}.a1-abcdef"
    return {"id": id_, "step": step, "name": name, "attempt": 1, "bytes": 100, "signature": name, "time": time}


def state(phase: str = "running", **ledger: Any) -> Line:
    ending = {"outcome": ledger.pop("outcome", "succeeded"), "exit_code": 0, "reason": "", "hint": ""}
    known = {"run": 1, "attempt": 1, "stored": [], "local": [], "rejected": [], "fruitless": 0, **ledger}
    return {"phase": phase, "details": {"ending": ending} if phase == "finished" else {}, "ledger": known}


def line(at: float, kind: str, told: Line | None = None, **event: Any) -> Line:
    return {"at": at, "event": {"type": kind, **event}} | ({"state": told} if told else {})


def started(at: float, host: str = "a", price: float | None = 3.6, full: float | None = 36.0) -> Line:
    return line(at, "Started", per_hour=price, on_demand_per_hour=full, currency="USD", host=host, monitors=["m"])


def account(*lines: Line) -> Account:
    return reduce(fold, lines, Account())


SAVED = checkpoint(10, 150.0, local=True)
STORED = checkpoint(10, 161.0)


def first_machine() -> list[Line]:
    """A paid start of 20 s, training from second 120; a checkpoint complete at 150 is stored from 160 to 165."""
    return [
        started(100.0),
        line(110.0, "TrainerStarted", state(), attempt=1),
        line(120.0, "Progressed", attempt=1, step=1, total=100, rate=0.5),
        line(151.0, "CheckpointSaved", state(local=[SAVED]), attempt=1, checkpoint=SAVED),
        line(165.0, "Uploaded", state(stored=[STORED]), checkpoint=STORED, local=SAVED["id"], seconds=5.0),
        line(200.0, "Progressed", attempt=1, step=50, total=100, rate=0.5),
    ]


def test_a_trainer_that_runs() -> None:
    told = status("job", account(*first_machine()), 220.0, alive=True)
    assert (told["phase"], told["step"], told["total"], told["eta_s"]) == ("running", 50, 100, 100.0)
    assert told["goodput"] == pytest.approx(100 / 120)
    assert told["checkpoint"]["at_risk_s"] == pytest.approx(70.0), "from the second in which it was complete"
    assert told["checkpoint"]["at_risk_cost"] == pytest.approx(70 * 3.6 / 3600)
    assert told["checkpoint"]["age_s"] == pytest.approx(59.0)
    assert told["cost"]["spent"] == pytest.approx(120 * 3.6 / 3600)
    assert told["cost"]["saved"] == pytest.approx(9 * told["cost"]["spent"])


def test_a_supervisor_that_has_vanished_earns_and_risks_nothing_more() -> None:
    now, later = (
        status("job", account(*first_machine()), at, alive=False) for at in (200.0, 90_000.0)
    )  # fmt: skip
    assert now["goodput"] == later["goodput"] == pytest.approx(30 / 100)
    assert now["cost"] == later["cost"]
    assert later["checkpoint"]["at_risk_s"] == 0.0


def test_what_a_vanished_machine_stored_was_not_in_vain() -> None:
    second = [
        started(300.0, "b"),
        line(301.0, "Recovered", state("preparing", stored=[STORED], attempt=2), stored=[STORED], local=[]),
        line(310.0, "TrainerStarted", state(stored=[STORED], resumed=STORED, attempt=2), attempt=2),
    ]
    told = status("job", account(*first_machine(), *second), 310.0, alive=True)
    assert told["goodput"] == pytest.approx(30 / (100 + 10))
    assert told["restarts"] == {"total": 1, "fruitless": 0, "preemptions": 1}
    assert told["step"] == 10, "until it reports one, a trainer stands where it was resumed"
    assert told["host"] == "b"


def test_what_a_killed_supervisor_left_on_the_disk_was_not_in_vain_either() -> None:
    newer = checkpoint(40, 190.0, local=True)
    again = [
        started(300.0),
        line(301.0, "Recovered", state("preparing", stored=[STORED], local=[newer]), stored=[STORED], local=[newer]),
    ]
    assert account_of.useful_seconds(account(*first_machine(), *again), 301.0, alive=True) == pytest.approx(70.0)


def test_a_crash_keeps_what_was_saved_and_a_good_end_keeps_all() -> None:
    crashed = line(210.0, "TrainerExited", state("backing_off", stored=[STORED]), attempt=1, code=1)
    done = line(210.0, "TrainerExited", state("flushing", stored=[STORED]), attempt=1, code=0)
    assert account_of.useful_seconds(account(*first_machine(), crashed), 999.0, alive=True) == pytest.approx(31.0)
    assert account_of.useful_seconds(account(*first_machine(), done), 999.0, alive=True) == pytest.approx(90.0)


def test_work_is_at_risk_until_it_is_stored_not_until_the_trainer_ends() -> None:
    newer = checkpoint(60, 208.0, local=True)
    owed = line(210.0, "TrainerExited", state("flushing", stored=[STORED], local=[newer]), attempt=1, code=0)
    clear = line(210.0, "TrainerExited", state("flushing", stored=[STORED]), attempt=1, code=0)
    told = status("job", account(*first_machine(), owed), 999.0, alive=True)
    assert told["checkpoint"]["at_risk_s"] == pytest.approx(60.0)
    assert told["checkpoint"]["lag_bytes"] == 100
    assert status("job", account(*first_machine(), clear), 999.0, alive=True)["checkpoint"]["at_risk_s"] == 0.0


def test_a_local_checkpoint_that_is_older_or_set_aside_is_no_lag() -> None:
    older, bad = checkpoint(5, 140.0, local=True), checkpoint(90, 199.0, local=True)
    told = state(stored=[STORED], local=[older, bad], rejected=[{"id": bad["id"], "step": 90, "reason": "bad"}])
    current = account(*first_machine(), line(201.0, "Noticed", told))
    assert status("job", current, 201.0, alive=True)["checkpoint"]["lag_bytes"] == 0


@pytest.mark.parametrize(("first", "second"), [(None, 1.0), (1.0, None), (None, None)])
def test_a_cost_that_nobody_knows_is_never_0(first: float | None, second: float | None) -> None:
    current = account(started(0.0, price=first), line(10.0, "Noticed"), started(20.0, "b", price=second))
    assert account_of.cost(current, 30.0, alive=True) == {"spent": None, "saved": None, "currency": None}


def test_savings_need_both_prices() -> None:
    current = account(started(0.0, price=3600.0, full=None), line(10.0, "Noticed"))
    assert account_of.cost(current, 10.0, alive=False) == {"spent": 10.0, "saved": None, "currency": "USD"}


def test_before_anything_is_known_nothing_is_claimed() -> None:
    told = status("job", Account(), 5.0, alive=False)
    assert told["phase"] == "waiting"
    assert [told[key] for key in ("run", "attempt", "host", "step", "goodput", "heard_at")] == [None] * 6
    assert told["cost"] == {"spent": None, "saved": None, "currency": None}


def test_preemptions_are_those_that_were_told_and_those_that_were_not() -> None:
    lines = [
        started(0.0), line(1.0, "StopRequested", state("finished", outcome="preempted")),
        started(2.0), line(3.0, "StopRequested", state("finished", outcome="stopped")),
        started(4.0), line(5.0, "Noticed", state("running")),
        started(6.0), line(7.0, "Noticed", state("running")),
    ]  # fmt: skip
    assert account_of.preemptions(account(*lines)) == 2


@pytest.mark.parametrize(
    "foreign",
    [
        line(130.0, "TrainerStarted"),
        line(130.0, "Uploaded", checkpoint=None),
        line(130.0, "Noticed") | {"state": {"phase": "finished"}},
        line(130.0, "Noticed") | {"state": ["running"]},
        {"at": "noon", "event": {"type": "Noticed"}},
        {"at": 1.0},
    ],
)
def test_a_line_of_a_shape_that_nobody_knows_counts_for_nothing(foreign: Line) -> None:
    assert fold(account(*first_machine()), foreign) == account(*first_machine())


def test_lines_before_the_first_session_count_for_nothing() -> None:
    assert account(line(1.0, "TrainerStarted", attempt=1)) == Account()


def test_a_clock_that_is_behind_makes_no_session_negative() -> None:
    current = account(started(100.0), line(90.0, "Noticed"))
    assert account_of.seconds_of(current, 95.0, alive=True) == [0.0]


def test_redaction_leaves_numbers_and_structure_alone() -> None:
    told = {"at": 1764.5, "event": {"type": "Noticed", "text": "pin 1764", "tail": ["1764", 1764, None, True]}}
    hidden = redacted(told, lambda text: text.replace("1764", "***"))
    assert hidden == {"at": 1764.5, "event": {"type": "Noticed", "text": "pin ***", "tail": ["***", 1764, None, True]}}


def test_numbers_that_json_does_not_know_are_written_as_unknown() -> None:
    assert plain((1.5, float("inf"), float("nan"), 2)) == [1.5, None, None, 2]


# -- what the next machine learns --------------------------------------------------------------------------------------


def life(at: float, until: float, provider: str, age: float = 0.0, outcome: str | None = None) -> list[Line]:
    end = line(until, "Noticed", state("finished", outcome=outcome) if outcome else state("running"))
    return [line(at, "Started", provider=provider, age=age), end]


def test_lives_of_machines_are_told_by_provider_and_age() -> None:
    lines = [
        *life(0.0, 1000.0, "aws spot"),
        *life(5000.0, 5500.0, "aws spot", age=1700.0, outcome="preempted"),
        *life(6000.0, 6100.0, "aws spot", outcome="stopped"),
        *life(7000.0, 9000.0, "gcp spot"),
    ]
    young, older, _ = history(account(*lines), "aws spot").lives
    assert (young.seconds, young.lost) == (1000.0 + 100.0 + 100.0, 1), "whoever was stopped on purpose is not lost"
    assert (older.seconds, older.lost) == (400.0, 1)
    assert sum(band.seconds for band in history(account(*lines), "gcp spot").lives) == 2000.0


def test_what_saves_cost_and_how_losses_were_is_handed_on() -> None:
    known = Ledger(
        saves=Saves(cost=0.5, persist=2.0), uploads=Uploads(seconds=9.0), losses=Losses(recent=Trend(20, 1.5, 0.1))
    )
    told = line(5.0, "Noticed", {"phase": "running", "details": {}, "ledger": plain(known)})
    learned = history(account(started(0.0), told), "")
    assert learned == History(learned.lives, 0.5, 2.0, 9.0, Trend(20, 1.5, 0.1))


@pytest.mark.parametrize("ledger", [{}, {"saves": 1, "losses": 2}, {"saves": {"cost": 1}, "losses": {"recent": None}}])
def test_lines_of_other_versions_teach_nothing(ledger: Line) -> None:
    told = line(5.0, "Noticed", {"phase": "running", "details": {}, "ledger": ledger})
    learned = history(account(started(0.0), told), "")
    assert (learned.cost, learned.losses) == (NO_HISTORY.cost, NO_HISTORY.losses)


def test_status_tells_the_cadence_with_its_reason_and_the_alarms() -> None:
    known = plain(Ledger(cadence=Cadence(85.0, 10.0, "every 85 s: ..."), alarms=(Alarm("loss", "the loss is 9"),)))
    told = status("job", account(started(0.0), line(5.0, "Noticed", state(**known))), 6.0, alive=True)
    assert told["cadence"] == {"save_every": 85.0, "upload_every": 10.0, "reason": "every 85 s: ..."}
    assert told["warnings"] == ["the loss is 9"]
    assert status("job", Account(), 5.0, alive=False)["cadence"] is None


def test_a_finished_run_that_is_submitted_once_more_keeps_its_record() -> None:
    done = [*first_machine(), line(210.0, "DoneMarked", state("finished", stored=[STORED]))]
    again = [started(900.0, "b"), line(901.0, "Recovered", state("finished", stored=[STORED]), run=1)]
    assert status("job", account(*done, *again), 950.0, alive=False) == status(
        "job", account(*done), 950.0, alive=False
    )
