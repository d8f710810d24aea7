"""Rules, one by one; and the whole table of them, pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runner.core import actions as do
from runner.core import decide as rules
from runner.core import events as on
from runner.core.decide import decide, wake_at
from runner.core.policy import Keep, Policy
from runner.core.state import (
    BackingOff,
    Ending,
    Finished,
    Flushing,
    Ledger,
    Rejected,
    Running,
    State,
    Stopping,
    Waiting,
)
from runner.errors import ExitCode
from tests.core.matrix import EVENTS, NOW, PHASES, POLICY, RUNNING, SAVED, STORED, TERM, checkpoint, known_in, table

PINNED = Path(__file__).with_name("matrix.txt")


def test_every_phase_and_every_event_is_as_pinned() -> None:
    """To change a rule, change the table with it: python -m tests.core.matrix > tests/core/matrix.txt."""
    assert table() == PINNED.read_text()


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_no_pair_makes_the_loop_spin(phase: str, event: str) -> None:
    state, _ = decide(POLICY, State(PHASES[phase], known_in(phase)), EVENTS[event], NOW)
    assert wake_at(POLICY, state) > NOW


def test_exit_codes_are_those_of_the_product() -> None:
    ours = (rules.SUCCEEDED, rules.TRAINER_FAILED, rules.STALLED, rules.NOT_STORED, rules.PREEMPTED)
    assert ours == (
        ExitCode.SUCCEEDED,
        ExitCode.TRAINER_FAILED,
        ExitCode.NO_PROGRESS,
        ExitCode.NOT_STORED,
        ExitCode.PREEMPTED,
    )


def running(ledger: Ledger | None = None, before: int = 10) -> State:
    return State(Running(900.0, STORED, before), ledger or Ledger(run=1, attempt=2, stored=(STORED,), prepared=True))


def test_an_attempt_that_added_a_checkpoint_is_followed_at_once() -> None:
    ledger = replace(running().ledger, local=(SAVED,))
    state, actions = decide(POLICY, running(ledger), on.TrainerExited(2, 1), NOW)
    assert do.Restore(3, SAVED) in actions
    assert do.Upload(SAVED) in actions, "what is owed goes out while no trainer runs"
    assert state.ledger.fruitless == 0


def test_a_fruitless_attempt_is_followed_by_a_doubling_wait_with_a_limit() -> None:
    waits = []
    policy = Policy(max_without_progress=9, backoff_first=5.0, backoff_limit=60.0)
    for fruitless in range(6):
        ledger = replace(running().ledger, fruitless=fruitless)
        state, _ = decide(policy, running(ledger), on.TrainerExited(2, -9), NOW)
        assert isinstance(state.phase, BackingOff)
        waits.append(state.phase.until - NOW)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_exit_0_after_a_stop_request_is_not_done() -> None:
    state, _ = decide(POLICY, running(), on.StopRequested(TERM), NOW)
    state, _ = decide(POLICY, state, on.TrainerExited(2, 0), NOW + 5)
    assert isinstance(state.phase, Finished)
    assert state.phase.ending == TERM


@pytest.mark.parametrize(
    ("exit_rules", "event", "expected"),
    [
        ((), on.TrainerExited(2, 0), "succeeded"),
        (((3, "succeed"),), on.TrainerExited(2, 3), "succeeded"),
        (((3, "fail"),), on.TrainerExited(2, 3), "failed"),
        (((3, "fail"),), on.TrainerExited(2, 3, retry="NCCL error"), "restart"),
        ((), on.TrainerExited(2, 1, fatal="out of memory", retry="NCCL error"), "failed"),
        ((), on.TrainerExited(2, 0, fatal="out of memory"), "succeeded"),
        (((0, "restart"),), on.TrainerExited(2, 0), "restart"),
        (((137, "fail"),), on.TrainerExited(2, -9), "failed"),
        ((), on.TrainerExited(2, 127, not_started="no such file"), "failed"),
    ],
)
def test_what_an_exit_means(exit_rules: tuple[tuple[int, str], ...], event: on.TrainerExited, expected: str) -> None:
    policy = Policy(on_exit=exit_rules)  # type: ignore[arg-type]
    state, _ = decide(policy, running(), event, NOW)
    phase = state.phase
    if expected == "restart":
        assert isinstance(phase, BackingOff)
    else:
        assert isinstance(phase, Flushing | Finished)
        ending = phase.ending if isinstance(phase, Finished) else getattr(phase.aim, "ending", None)
        assert isinstance(ending, Ending)
        assert ending.outcome == expected


def test_a_checkpoint_that_fails_to_load_twice_is_set_aside_with_every_copy() -> None:
    older, twin = checkpoint(5), replace(STORED, id="local:step-10")
    ledger = Ledger(run=1, attempt=2, stored=(older, STORED), local=(twin,), prepared=True, resumed=STORED)
    state = State(Running(900.0, STORED, 10), ledger)
    state, _ = decide(POLICY, state, on.TrainerExited(2, 1), NOW)
    assert not state.ledger.rejected
    state = State(Running(NOW, STORED, 10), replace(state.ledger, attempt=3, resumed=STORED))
    state, _ = decide(POLICY, state, on.TrainerExited(3, 1), NOW + 10)
    assert {rejected.id for rejected in state.ledger.rejected} == {STORED.id, twin.id}
    state, actions = decide(POLICY, state, on.Woke(), NOW + 1000)
    assert do.Restore(4, older) in actions


def test_a_foreign_kill_says_nothing_of_the_checkpoint() -> None:
    ledger = replace(running().ledger, resumed=STORED)
    state, _ = decide(POLICY, running(ledger), on.TrainerExited(2, -9), NOW)
    assert not state.ledger.load_failures


def test_a_full_disk_says_nothing_of_the_checkpoint() -> None:
    ledger = replace(running().ledger, resumed=STORED)
    words = ("OSError: [Errno 28] No space left on device",)
    state, _ = decide(POLICY, running(ledger), on.TrainerExited(2, 1, tail=words), NOW)
    assert not state.ledger.load_failures


def test_never_a_silent_fresh_start() -> None:
    event = on.Recovered(1, 1, rejected=(Rejected("step-10.a1-abcdef", 10, "a file is missing"),))
    state, _ = decide(POLICY, State(), event, NOW)
    state, actions = decide(POLICY, state, on.Prepared(2), NOW)
    assert isinstance(state.phase, Finished)
    assert state.phase.ending.exit_code == ExitCode.TRAINER_FAILED
    assert "none is usable" in state.phase.ending.reason
    assert not any(isinstance(action, do.StartTrainer) for action in actions)


def test_starting_over_is_noticed() -> None:
    ledger = replace(running().ledger, resumed=STORED)
    state, _ = decide(POLICY, running(ledger), on.Progressed(2, 1), NOW)
    assert state.ledger.started_over
    state, _ = decide(POLICY, running(ledger), on.Progressed(2, 11), NOW)
    assert not state.ledger.started_over


def test_uploads_keep_their_distance_while_the_trainer_runs() -> None:
    policy = Policy(upload_every=60.0)
    state, actions = decide(policy, running(), on.CheckpointSaved(2, SAVED), NOW)
    assert do.Upload(SAVED) in actions, "the first one goes at once: it proves that all works"
    state, _ = decide(policy, state, on.Uploaded(SAVED.id, replace(SAVED, id="step-20.a2-abcdef"), 1.0), NOW + 1)
    newer = checkpoint(30, local=True)
    state, actions = decide(policy, state, on.CheckpointSaved(2, newer), NOW + 10)
    assert not any(isinstance(action, do.Upload) for action in actions)
    assert wake_at(policy, state) == NOW + 60
    _, actions = decide(policy, state, on.Woke(), NOW + 60)
    assert do.Upload(newer) in actions


def test_a_name_without_a_step_gets_the_step_that_the_trainer_last_reported() -> None:
    state, _ = decide(POLICY, running(), on.Progressed(2, 17), NOW)
    unnamed = replace(SAVED, step=0)
    state, _ = decide(POLICY, state, on.CheckpointSaved(2, unnamed, step_known=False), NOW)
    assert state.ledger.local[0].step == 17


def test_success_is_owed_its_last_checkpoint() -> None:
    ledger = replace(running().ledger, local=(SAVED,))
    state, actions = decide(POLICY, running(ledger), on.TrainerExited(2, 0), NOW)
    assert do.NoteTrained(SAVED.signature) in actions
    assert do.Upload(SAVED) in actions
    for attempt in range(5):
        state, _ = decide(POLICY, state, on.UploadFailed(SAVED.id, "no answer"), NOW + attempt)
        assert isinstance(state.phase, Flushing)
        state = replace(state, ledger=replace(state.ledger, uploads=replace(state.ledger.uploads, current=SAVED)))
    state, _ = decide(POLICY, state, on.UploadFailed(SAVED.id, "no answer"), NOW + POLICY.give_up_storing)
    assert isinstance(state.phase, Finished)
    assert state.phase.ending.exit_code == ExitCode.NOT_STORED
    assert "step 20" in state.phase.ending.reason


def test_a_denied_last_checkpoint_ends_at_once() -> None:
    ledger = replace(running().ledger, local=(SAVED,))
    state, _ = decide(POLICY, running(ledger), on.TrainerExited(2, 0), NOW)
    state, _ = decide(POLICY, state, on.UploadFailed(SAVED.id, "access denied", retryable=False), NOW + 1)
    assert isinstance(state.phase, Finished)
    assert state.phase.ending.exit_code == ExitCode.NOT_STORED


def test_a_deaf_trainer_meets_growing_force() -> None:
    state, actions = decide(POLICY, running(), on.StopRequested(TERM), NOW)
    assert do.SignalTrainer(2, "ranks") in actions
    state, actions = decide(POLICY, state, on.Woke(), NOW + 30)
    assert do.SignalTrainer(2, "group") in actions
    state, actions = decide(POLICY, state, on.Woke(), NOW + 32)
    assert do.KillTrainer(2) in actions
    assert wake_at(POLICY, state) == NOW + 37, "asked again, until it has gone"


def test_a_second_request_shortens_the_wait() -> None:
    state, _ = decide(POLICY, running(), on.StopRequested(TERM), NOW)
    state, actions = decide(POLICY, state, on.StopRequested(TERM), NOW + 1)
    assert do.SignalTrainer(2, "group") in actions
    assert isinstance(state.phase, Stopping)
    assert state.phase.until == NOW + 3


def test_a_copy_of_a_checkpoint_that_was_set_aside_does_not_count_as_kept() -> None:
    """The local copy failed to load; its twin in the store must not push the last good one out."""
    bad = checkpoint(20)
    rejected = (Rejected("local:step-20", 20, "died twice", bad.signature),)
    ledger = Ledger(run=1, attempt=2, stored=(STORED, bad), rejected=rejected, prepared=True, prune_due=True)
    state, actions = decide(Policy(keep=Keep(last=1)), State(RUNNING, ledger), on.Noticed(""), NOW)
    assert not any(isinstance(action, do.Prune) for action in actions)
    assert STORED in state.ledger.stored


def test_a_failed_prune_waits_for_the_next_commit() -> None:
    many = tuple(checkpoint(step) for step in (1, 2, 3, 4))
    ledger = Ledger(run=1, attempt=2, stored=many, prepared=True, prune_due=True)
    state, actions = decide(POLICY, State(RUNNING, ledger), on.Noticed(""), NOW)
    assert [type(action) for action in actions] == [do.Prune]
    state, actions = decide(POLICY, state, on.Pruned(("step-1.a1-abcdef",), "no answer"), NOW)
    assert not actions
    assert len(state.ledger.stored) == 4


def test_events_of_another_attempt_change_nothing() -> None:
    before = running()
    assert decide(POLICY, before, on.TrainerExited(1, 0), NOW) == (before, ())
    assert decide(POLICY, before, on.Recovered(1, 5), NOW) == (before, ())


def test_a_supervisor_begins_by_asking() -> None:
    state, actions = decide(POLICY, State(), on.Started(), NOW)
    assert (state.phase, actions) == (Waiting(), (do.TakeLease(),))


def test_a_local_checkpoint_newer_than_all_stored_is_resumed() -> None:
    state, _ = decide(POLICY, State(), on.Recovered(1, 1, (STORED,), (SAVED,)), NOW)
    _, actions = decide(POLICY, state, on.Prepared(2), NOW)
    assert do.Restore(2, SAVED) in actions
