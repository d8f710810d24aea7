"""The rules by which nothing is lost on the way out, and nobody is blamed for what he did not do."""

from __future__ import annotations

from dataclasses import replace

from runner.core import actions as do
from runner.core import events as on
from runner.core.decide import LONGEST_LOAD, decide, wake_at
from runner.core.policy import Policy
from runner.core.state import (
    Ending,
    Finished,
    Flushing,
    Holding,
    Leave,
    Ledger,
    Preparing,
    Running,
    State,
    Stopping,
    Uploads,
)
from tests.core.matrix import HOLD, NOW, POLICY, RUNNING, SAVED, STOP, STORED, TERM, checkpoint

KNOWN = Ledger(run=1, attempt=2, stored=(STORED,), prepared=True)
ON_ITS_WAY = replace(KNOWN, local=(SAVED,), uploads=Uploads(current=SAVED, last_at=990.0))
STORED_NOW = on.Uploaded(SAVED.id, replace(SAVED, id="step-20.a2-abcdef", time=NOW), 3.0)
FAILED = Ending("failed", 70, "exit code 1")


def test_the_end_of_a_held_machine_does_not_cut_the_upload_that_is_on_its_way() -> None:
    state, _ = decide(POLICY, State(Holding(HOLD), ON_ITS_WAY), on.StopRequested(TERM), NOW)
    assert isinstance(state.phase, Flushing)
    state, _ = decide(POLICY, state, STORED_NOW, NOW + 1)
    assert state.phase == Finished(TERM)


def test_a_failed_job_stores_its_last_checkpoint_before_it_obeys_the_first_request() -> None:
    state = State(Flushing(Leave(FAILED), 990.0, 1020.0, FAILED), ON_ITS_WAY)
    asked, _ = decide(POLICY, state, on.StopRequested(TERM), NOW)
    assert isinstance(asked.phase, Flushing)
    stored, _ = decide(POLICY, asked, STORED_NOW, NOW + 1)
    assert stored.phase == Finished(FAILED)
    twice, _ = decide(POLICY, asked, on.StopRequested(STOP), NOW + 1)
    assert twice.phase == Finished(FAILED)
    in_vain, _ = decide(POLICY, asked, on.UploadFailed(SAVED.id, "no answer", retryable=False), NOW + 1)
    assert in_vain.phase == Finished(TERM), "the same command again stores it"


def test_stop_now_ends_a_flush_before_a_hold_at_once() -> None:
    state = State(Flushing(HOLD, 990.0, 1030.0, TERM), ON_ITS_WAY)
    state, _ = decide(POLICY, state, on.StopRequested(STOP, now=True), NOW)
    assert state.phase == Finished(STOP)


def test_a_save_on_notice_is_uploaded_although_the_trainer_does_not_leave() -> None:
    state, _ = decide(POLICY, State(RUNNING, KNOWN), on.StopRequested(TERM), NOW)
    state, actions = decide(POLICY, state, on.CheckpointSaved(2, SAVED), NOW + 2)
    assert isinstance(state.phase, Stopping)
    assert do.Upload(SAVED) in actions
    assert wake_at(POLICY, state) == NOW + POLICY.grace


def test_an_older_checkpoint_keeps_the_lane_free_for_the_save_on_notice() -> None:
    ledger = replace(KNOWN, local=(SAVED,), uploads=Uploads(last_at=NOW - 1))
    state, actions = decide(POLICY, State(RUNNING, ledger), on.StopRequested(TERM), NOW)
    assert not any(isinstance(action, do.Upload) for action in actions)
    _, actions = decide(POLICY, state, on.Noticed(""), NOW + 1)
    assert not any(isinstance(action, do.Upload) for action in actions)


def test_who_is_in_a_hurry_begins_no_upload() -> None:
    state, _ = decide(POLICY, State(RUNNING, KNOWN), on.StopRequested(STOP, now=True), NOW)
    state, actions = decide(POLICY, state, on.CheckpointSaved(2, SAVED), NOW + 0.5)
    assert not any(isinstance(action, do.Upload) for action in actions)
    state, actions = decide(POLICY, state, on.TrainerExited(2, 0), NOW + 1)
    assert state.phase == Finished(STOP)
    assert not any(isinstance(action, do.Upload) for action in actions)


def test_a_withdrawn_notice_is_no_fruitless_attempt() -> None:
    policy = Policy(max_without_progress=1)
    state, _ = decide(policy, State(RUNNING, KNOWN), on.NoticeReceived("cloud", NOW + 120, "taken"), NOW)
    state, _ = decide(policy, state, on.NoticeWithdrawn("cloud"), NOW + 1)
    state, _ = decide(policy, state, on.TrainerExited(2, 0), NOW + 2)
    assert isinstance(state.phase, Preparing)
    assert (state.ledger.attempt, state.ledger.fruitless) == (3, 0)


def test_a_trainer_that_died_long_after_it_was_resumed_had_loaded_its_checkpoint() -> None:
    ledger = replace(KNOWN, resumed=STORED)
    running = Running(NOW, STORED, 10)
    soon, _ = decide(POLICY, State(running, ledger), on.TrainerExited(2, 1), NOW + 60)
    late, _ = decide(POLICY, State(running, ledger), on.TrainerExited(2, 1), NOW + LONGEST_LOAD + 1)
    assert soon.ledger.load_failures == ((STORED.signature, 1),)
    assert late.ledger.load_failures == ()


def test_a_trainer_that_was_told_to_stop_says_nothing_of_its_checkpoint() -> None:
    stopping = Stopping(Running(NOW - 5, STORED, 10), Leave(TERM), "asked", NOW + 10)
    state, _ = decide(POLICY, State(stopping, replace(KNOWN, resumed=STORED)), on.TrainerExited(2, 143), NOW)
    assert state.ledger.load_failures == ()


def test_both_requests_of_a_finished_job() -> None:
    last = checkpoint(20, local=True)
    state = State(Flushing(Leave(Ending("succeeded", 0, "")), 990.0, 4600.0), replace(ON_ITS_WAY, local=(last,)))
    state, _ = decide(POLICY, state, on.StopRequested(TERM), NOW)
    assert isinstance(state.phase, Flushing)
    assert state.phase.give_up_at == NOW + POLICY.grace
    state, _ = decide(POLICY, state, on.StopRequested(TERM), NOW + 1)
    assert state.phase == Finished(TERM)
