"""What a person reads on the console, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.core import actions as do
from runner.core import events as on
from runner.core.events import Event
from runner.core.record import Entry
from runner.core.state import (
    BackingOff,
    Checkpoint,
    Ending,
    Finished,
    Hold,
    Holding,
    LastStop,
    Leave,
    Ledger,
    Preparing,
    Rejected,
    Running,
    State,
    Stopping,
    Waiting,
)
from runner.report.console import Story, narrate

STORED = Checkpoint("step-10.a1-abcdef", 10, "step-10.pt", 1, 1, 2048, "s10", 5.0)
SAVED = replace(STORED, id="local:step-20.pt", step=20, signature="s20")
CRASHED = Ledger(last_stop=LastStop("crashed", "exit code 1", 1))
ASKED = Ledger(last_stop=LastStop("preempted", "asked to leave by SIGTERM", 0))
HELD = Holding(Hold("cloud", 9.0, "taken"))
RUNNING = Running(1.0, None, -1)


def told(event: Event, state: State | None = None, *actions: do.Action, before: State | None = None) -> list[str]:
    return narrate(Entry(100.0, before or State(), event, state or State(), actions))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (on.Started(), []),
        (on.Woke(), []),
        (on.LeaseTaken("abcdef", "a", 1), []),
        (
            on.LeaseHeld("fedcba", "b", 1, 1_000_000_000.0),
            [
                "b runs this job since 2001-09-09 01:46:40 UTC (session fedcba); standing by",
                "this machine takes over when that one leaves without having finished, or dies",
            ],
        ),
        (
            on.LeaseHeld("", "", 0, 5.0),
            ["no machine has begun this job yet; standing by until one has, and leaves or dies"],
        ),
        (on.StandbyChanged(("b", "c")), ["standing by: b, c"]),
        (on.StandbyChanged(()), ["no other machine stands by any more"]),
        (
            on.LeaseLost("another machine has taken over: b"),
            [
                "another machine has taken over: b: the trainer is stopped here, and nothing more is stored from here",
            ],
        ),
        (on.Recovered(2, 0), ["run 2: no checkpoint yet"]),
        (on.Recovered(2, 3, done=True), ["run 2 is finished"]),
        (
            on.Recovered(1, 3, (STORED,), (SAVED,), (Rejected("x", 5, "bad"),)),
            ["run 1: 1 checkpoint(s) stored, the newest known is of step 20, 1 unusable"],
        ),
        (on.Recovered(1, 3, rejected=(Rejected("x", 5, "bad"),)), ["run 1: no checkpoint yet, 1 unusable"]),
        (on.RecoverFailed("away", 69), []),
        (on.Prepared(1), []),
        (on.PrepareFailed(1, "no data", 78), []),
        (on.Restored(1, "x", "/c"), []),
        (on.CheckpointRejected(1, "x", "bad digest"), ["checkpoint x is set aside: bad digest"]),
        (on.TrainerStarted(1, 7, "python train.py"), ["attempt 1, from the beginning: python train.py"]),
        (on.TrainerJoined(1), ["the trainer can be asked to save"]),
        (on.Progressed(1, 5), []),
        (on.CheckpointSaved(1, SAVED), []),
        (on.TrainerExited(1, 127, not_started="no such file"), ["the command could not be started: no such file"]),
        (on.TrainerHung(1, "no step for 15m"), ["the trainer hangs: no step for 15m"]),
        (on.Uploaded(SAVED.id, STORED, 65.0), ["checkpoint of step 10 is stored (2 KiB, 1m5s)"]),
        (on.UploadFailed("x", "no answer"), ["could not store: no answer"]),
        (
            on.UploadFailed("x", "vanished", gone=True),
            ["a checkpoint changed before it was stored; the next one is taken (vanished)"],
        ),
        (on.Pruned(("x",)), []),
        (on.Pruned(("x",), "denied"), ["could not delete old checkpoints: denied"]),
        (on.DoneMarked(), []),
        (on.DoneNotMarked("no answer"), ["could not store: no answer"]),
        (on.StopRequested(Ending("stopped", 130, "stopped by Ctrl-C")), ["asked to leave: stopped by Ctrl-C"]),
        (on.NoticeReceived("cloud", 9.0, "taken"), ["this machine goes: taken (cloud)"]),
        (on.NoticeWithdrawn("cloud"), ["the notice was withdrawn (cloud)"]),
        (on.DeadlineKnown("slurm", 9.0, "the time limit"), []),
        (on.StoreStruggled("write", "503", 2.0), ["the store has trouble: 503; trying again"]),
        (on.Noticed("something"), ["something"]),
    ],
)
def test_what_each_event_says(event: Event, expected: list[str]) -> None:
    assert told(event) == expected


def test_every_event_is_in_the_table_above() -> None:
    cases = next(mark for mark in test_what_each_event_says.pytestmark).args[1]  # type: ignore[attr-defined]
    assert {type(event) for event, _ in cases} == set(on.Event.__args__)


def test_a_failure_comes_with_the_last_words_and_an_end_that_was_asked_for_without() -> None:
    tail = tuple(f"line {number}" for number in range(20))
    failed = told(on.TrainerExited(1, 1, tail), State(BackingOff(105.0, ""), CRASHED))
    assert failed[0] == "the trainer failed: exit code 1; its last lines:"
    assert failed[1:-1] == [f"    line {number}" for number in range(5, 20)]
    assert failed[-1] == "next attempt in 5s"
    assert told(on.TrainerExited(1, 0, tail), State(RUNNING, ASKED)) == [
        "the trainer has ended (asked to leave by SIGTERM)"
    ]


def test_a_takeover_is_told_by_who_has_waited() -> None:
    waiting = State(Waiting("b runs this job"))
    assert told(on.LeaseTaken("abcdef", "a", 2), State(), before=waiting) == [
        "taking over: this machine runs the job now"
    ]


def test_a_trainer_that_starts_over_is_told_of_once() -> None:
    ledger = Ledger(resumed=STORED, started_over=True)
    state = State(RUNNING, ledger)
    first = told(on.Progressed(1, 3), state, before=State(RUNNING, replace(ledger, started_over=False)))
    assert len(first) == 1
    assert "was given the checkpoint of step 10 and is at step 3" in first[0]
    assert told(on.Progressed(1, 4), state, before=state) == []


def test_holding_is_told_once_and_does_not_claim_too_much() -> None:
    clear, owing = State(HELD), State(HELD, Ledger(local=(SAVED,)))
    before = State(Preparing(1.0))
    assert told(on.Woke(), clear, before=before)[0].startswith("everything that could be saved is stored")
    assert told(on.Woke(), owing, before=before)[0].startswith("step 20 is not stored yet")
    assert told(on.Woke(), clear, before=clear) == []


def test_what_actions_and_ends_say() -> None:
    assert told(on.Woke(), None, do.Restore(1, STORED)) == ["restoring the checkpoint of step 10 (2 KiB)"]
    assert told(on.Woke(), None, do.Prune((("x", "superseded"),))) == ["deleting x: superseded"]
    assert told(on.Woke(), None, do.KillTrainer(1)) == ["the trainer does not stop: killing it and all that it started"]
    stopping = State(Stopping(RUNNING, Leave(Ending("stopped", 143, "")), "asked", 130.0))
    assert told(on.Woke(), stopping, do.AnnounceStop(1, 130.0)) == [
        "asking the trainer to save and stop, for at most 30s"
    ]
    assert told(on.Woke(), State(Finished(Ending("succeeded", 0, "all good")))) == ["done: all good"]
    assert told(on.Woke(), State(Finished(Ending("failed", 70, "no good")))) == ["leaving: exit code 70"]


def test_a_success_without_a_checkpoint_is_no_reason_to_cheer() -> None:
    ending = Finished(Ending("succeeded", 0, "the trainer finished"))
    (warning, done) = told(on.DoneMarked(), State(ending, Ledger(run=1, done=True)))
    assert "no checkpoint was ever seen" in warning
    assert done == "done: the trainer finished"
    assert told(on.DoneMarked(), State(ending, Ledger(run=1, done=True, stored=(STORED,)))) == [done]


REFUSED = "s3://bucket/jobs/job/lease.json: no answer from http://127.0.0.1:9: Connection refused"


def test_trouble_is_told_of_the_store_not_of_each_object() -> None:
    (line,) = told(on.StoreStruggled("lease", REFUSED, 2.0))
    assert line == "s3://bucket has trouble: no answer from http://127.0.0.1:9: Connection refused; trying again"
    (line,) = told(on.StoreStruggled("write", "/mnt/jobs/x: Input/output error", 2.0))
    assert line == "the store has trouble: /mnt/jobs/x: Input/output error; trying again"


def test_trouble_that_goes_on_is_told_now_and_then() -> None:
    story, lines = Story(), list[tuple[float, str]]()
    trouble = on.StoreStruggled("lease", REFUSED, 0.1)
    for second in (100.0, 100.2, 101.0, 109.9, 110.1, 120.2, 150.0):
        lines += [(second, line) for line in story(Entry(second, State(), trouble, State(), ()))]
    assert [(second, line.rpartition("; ")[2]) for second, line in lines] == [
        (100.0, "trying again"),
        (110.1, "trying again (3 more failure(s) since the last such line)"),
        (120.2, "trying again"),
        (150.0, "trying again"),
    ]


def test_what_else_happens_meanwhile_is_told_at_once() -> None:
    story, trouble = Story(), on.StoreStruggled("lease", REFUSED, 0.1)
    assert len(story(Entry(100.0, State(), trouble, State(), ()))) == 1
    assert story(Entry(100.1, State(), on.Noticed("something"), State(), ())) == ["something"]
    ending = State(Finished(Ending("failed", 69, "no answer")))
    assert story(Entry(100.2, State(), trouble, ending, ())) == ["leaving: exit code 69"]
