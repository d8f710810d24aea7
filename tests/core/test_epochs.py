"""The lease, seen by the rules: who may write, and whose checkpoints count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.core import actions as do
from runner.core import events as on
from runner.core.decide import decide, wake_at
from runner.core.ledger import Account, fold, status
from runner.core.policy import Keep, Policy
from runner.core.record import Entry, to_line
from runner.core.restart import describe
from runner.core.retention import retain
from runner.core.state import (
    BackingOff,
    Checkpoint,
    Finished,
    Flushing,
    Holding,
    Lease,
    Leave,
    Ledger,
    Preparing,
    Restart,
    Running,
    State,
    Stopping,
    Uploads,
    Waiting,
    age,
    may_write,
    newest_stored,
    owed,
    usable,
)
from tests.core.matrix import DONE, HOLD, NOW, OURS, POLICY, RUNNING, SAVED, STOP, STORED, TERM, checkpoint

KNOWN = Ledger(OURS, 2, run=1, attempt=2, stored=(STORED,), prepared=True)
LOST = on.LeaseLost("another machine has taken over: host-b")


def of(epoch: int, step: int, *, local: bool = False) -> Checkpoint:
    return replace(checkpoint(step, local=local), id=f"{'local:' if local else ''}e{epoch}-s{step}", epoch=epoch,
                   signature=f"{epoch}-{step}-{local}")  # fmt: skip


# -- taking and waiting ------------------------------------------------------------------------------------------------


def test_nothing_is_asked_of_the_store_before_the_lease_is_ours() -> None:
    state, actions = decide(POLICY, State(), on.Started(), NOW)
    assert actions == (do.TakeLease(),)
    state, actions = decide(POLICY, state, on.LeaseTaken("abcdef", "host-a", 1), NOW)
    assert actions == (do.Recover(),)
    assert may_write(state.ledger)


def test_a_standby_warms_up_once_and_says_for_whom_it_waits() -> None:
    state, actions = decide(POLICY, State(), on.LeaseHeld("fedcba", "host-b", 2, 5.0), NOW)
    assert actions == (do.WarmUp(),)
    assert state.phase == Waiting("host-b runs this job")
    assert not may_write(state.ledger)
    state, actions = decide(POLICY, state, on.LeaseHeld("ffffff", "host-c", 3, 5.0), NOW)
    assert actions == ()
    assert state.phase == Waiting("host-c runs this job")
    state, actions = decide(POLICY, state, on.LeaseTaken("abcdef", "host-a", 4), NOW)
    assert (state.phase, actions) == (Waiting(), (do.Recover(),))


def test_a_standby_that_is_asked_to_leave_leaves_at_once() -> None:
    waiting = State(Waiting("host-b runs this job"), Ledger(Lease(False, "fedcba", "host-b", 2)))
    assert decide(POLICY, waiting, on.StopRequested(STOP), NOW) == (State(Finished(STOP), waiting.ledger), ())


def test_a_job_that_was_done_meanwhile_is_not_trained_again() -> None:
    state = State(Waiting(), Ledger(OURS))
    state, actions = decide(POLICY, state, on.Recovered(1, 1, (STORED,), done=True, epoch=2), NOW)
    assert isinstance(state.phase, Finished)
    assert (state.phase.ending.exit_code, actions) == (0, ())


# -- losing ------------------------------------------------------------------------------------------------------------


def test_who_loses_the_lease_stops_the_trainer_and_writes_nothing_more() -> None:
    ledger = replace(KNOWN, local=(SAVED,), uploads=Uploads(current=SAVED, last_at=990.0), prune_due=True)
    state, actions = decide(POLICY, State(RUNNING, ledger), LOST, NOW)
    assert actions == (do.SignalTrainer(2, "group"),)
    state, actions = decide(POLICY, state, on.CheckpointSaved(2, checkpoint(30, local=True)), NOW + 0.5)
    assert actions == ()
    state, actions = decide(POLICY, state, on.UploadFailed(SAVED.id, "the lease is lost", retryable=False), NOW + 0.6)
    assert actions == ()
    state, actions = decide(POLICY, state, on.TrainerExited(2, 143), NOW + 1)
    assert actions == ()
    assert isinstance(state.phase, Finished)
    assert (state.phase.ending.outcome, state.phase.ending.exit_code) == ("preempted", 75)
    assert "host-b" in state.phase.ending.reason


def test_a_deaf_trainer_is_killed_when_the_lease_is_lost() -> None:
    state, _ = decide(POLICY, State(RUNNING, KNOWN), LOST, NOW)
    state, actions = decide(POLICY, state, on.Woke(), wake_at(POLICY, state))
    assert actions == (do.KillTrainer(2),)


@pytest.mark.parametrize(
    "phase",
    [
        Waiting(),
        Preparing(900.0),
        Preparing(900.0, STORED),
        BackingOff(1005.0, "exit code 1"),
        Flushing(Leave(DONE), 990.0, 4600.0),
        Flushing(HOLD, 990.0, 1030.0, TERM),
    ],
)
def test_without_a_trainer_it_leaves_at_once(phase: Waiting | Preparing | BackingOff | Flushing) -> None:
    state, actions = decide(POLICY, State(phase, replace(KNOWN, local=(SAVED,))), LOST, NOW)
    assert isinstance(state.phase, Finished)
    assert (state.phase.ending.exit_code, actions) == (75, ())


@pytest.mark.parametrize("aim", [Leave(TERM), HOLD, Restart("hung", hung=True)])
def test_whatever_a_stop_was_for_it_leaves_as_one_that_lost(aim: Leave | Restart) -> None:
    state, _ = decide(POLICY, State(Stopping(RUNNING, aim, "asked", 1010.0), KNOWN), LOST, NOW)
    state, actions = decide(POLICY, state, on.TrainerExited(2, 0), NOW + 1)
    assert isinstance(state.phase, Finished)
    assert (state.phase.ending.exit_code, actions) == (75, ())
    assert "host-b" in state.phase.ending.reason


# -- holding -----------------------------------------------------------------------------------------------------------


def test_a_machine_that_waits_for_its_end_lets_go_when_nothing_is_owed() -> None:
    owing = replace(KNOWN, local=(SAVED,), uploads=Uploads(current=SAVED, last_at=990.0))
    state, actions = decide(POLICY, State(Holding(HOLD), owing), on.Noticed(""), NOW)
    assert actions == ()
    stored = replace(SAVED, id="step-20.a2-abcdef", time=NOW)
    state, actions = decide(POLICY, state, on.Uploaded(SAVED.id, stored, 3.0), NOW + 1)
    assert actions == (do.ReleaseLease(),)
    assert not may_write(state.ledger)
    state, actions = decide(POLICY, state, on.NoticeWithdrawn("cloud"), NOW + 2)
    assert (state.phase, actions) == (Waiting(), (do.TakeLease(),))
    state, actions = decide(POLICY, state, on.LeaseHeld("fedcba", "host-b", 3, NOW), NOW + 3)
    assert state.phase == Waiting("host-b runs this job")


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_the_epoch_counts_before_the_step() -> None:
    stale, newer = of(1, 90), of(2, 40)
    assert age(newer) > age(stale)
    ledger = replace(KNOWN, stored=(stale, newer))
    assert newest_stored(ledger) == newer
    assert usable(ledger) == [newer, stale]
    left_here = of(1, 95, local=True)
    assert owed(replace(ledger, local=(left_here,))) is None, "a stale machine's leftovers are not stored either"


def test_new_checkpoints_are_of_the_holders_epoch() -> None:
    state, _ = decide(POLICY, State(RUNNING, replace(KNOWN, epoch=7)), on.CheckpointSaved(2, SAVED), NOW)
    assert state.ledger.local[0].epoch == 7


def test_what_a_trainer_saves_that_started_over_does_not_beat_what_it_was_given() -> None:
    given = of(3, 50)
    ledger = replace(KNOWN, epoch=4, stored=(given,), resumed=given)
    state, actions = decide(POLICY, State(RUNNING, ledger), on.CheckpointSaved(2, checkpoint(5, local=True)), NOW)
    assert state.ledger.local[0].epoch == 3
    assert not any(isinstance(action, do.Upload) for action in actions)
    assert newest_stored(state.ledger) == given
    state, actions = decide(POLICY, state, on.CheckpointSaved(2, checkpoint(55, local=True)), NOW + 1)
    assert [action.checkpoint.step for action in actions if isinstance(action, do.Upload)] == [55]


def test_a_stale_checkpoint_of_a_higher_step_neither_blocks_nor_proves_anything() -> None:
    """The attempt resumed at 40, in a store where a stale machine has left step 90."""
    stale, given = of(1, 90), of(2, 40)
    ledger = replace(KNOWN, epoch=3, stored=(stale, given), resumed=given)
    state, _ = decide(POLICY, State(Preparing(900.0, given), ledger), on.Restored(2, given.id, "/c"), NOW)
    assert isinstance(state.phase, Running)
    assert state.phase.newest_before == 40
    saved, _ = decide(POLICY, state, on.CheckpointSaved(2, checkpoint(45, local=True)), NOW + 1)
    after, _ = decide(POLICY, saved, on.TrainerExited(2, 1), NOW + 2)
    assert after.ledger.fruitless == 0, "45 is progress"
    assert not after.ledger.load_failures
    died, _ = decide(POLICY, state, on.TrainerExited(2, 1), NOW + 2)
    assert died.ledger.fruitless == 1
    assert died.ledger.load_failures == ((given.signature, 1),), f"{describe(1)} right after loading"


def test_the_copy_in_the_store_of_what_was_resumed_is_no_progress() -> None:
    here = of(2, 40, local=True)
    there = replace(here, id="step-40.a2-abcdef", time=NOW)
    ledger = replace(KNOWN, epoch=3, stored=(there,), resumed=here)
    state, _ = decide(POLICY, State(Running(NOW, here, 40), ledger), on.TrainerExited(2, 1), NOW + 2)
    assert state.ledger.load_failures == ((here.signature, 1),)


def test_retention_keeps_the_newest_epoch_before_the_highest_step() -> None:
    verdicts = {one.id: one.keep for one in retain([of(1, 80), of(1, 90), of(2, 40), of(2, 45)], last=2)}
    assert verdicts == {"e2-s45": True, "e2-s40": True, "e1-s90": False, "e1-s80": False}
    bad = {one.id: one.keep for one in retain([of(1, 90), of(2, 40)], last=1, rejected=frozenset({"e1-s90"}))}
    assert bad == {"e2-s40": True, "e1-s90": False}
    newest_bad = {one.id: one.keep for one in retain([of(1, 90), of(2, 40)], last=1, rejected=frozenset({"e2-s40"}))}
    assert newest_bad == {"e1-s90": True, "e2-s40": True}


def test_nothing_is_pruned_by_who_may_not_write() -> None:
    many = tuple(checkpoint(step) for step in (1, 2, 3, 4))
    ledger = replace(KNOWN, lease=replace(OURS, ours=False), stored=many, prune_due=True)
    _, actions = decide(Policy(keep=Keep(last=1)), State(Holding(HOLD), ledger), on.Noticed(""), NOW)
    assert actions == ()


# -- what is told ------------------------------------------------------------------------------------------------------


def told(state: State, *events: on.Event) -> dict[str, object]:
    account = Account()
    for event in (on.Started("host-a", "abcdef"), *events):
        before = state
        state, actions = decide(POLICY, state, event, NOW)
        account = fold(account, to_line(Entry(NOW, before, event, state, actions)))
    assert account.sessions[0].id == "abcdef"
    return status("job", account, NOW, alive=True)


def test_status_says_who_holds_the_lease_and_who_waits() -> None:
    taken = on.LeaseTaken("abcdef", "host-a", 3)
    assert told(State(), taken)["lease"] == {"holder": "abcdef", "host": "host-a", "epoch": 3, "standby": []}
    waited_for = told(State(), taken, on.StandbyChanged(("host-b",)))
    assert waited_for["lease"] == {"holder": "abcdef", "host": "host-a", "epoch": 3, "standby": ["host-b"]}
    assert told(State(), taken, on.LeaseLost("gone"))["lease"] is None
    assert told(State(), on.LeaseTaken("abcdef", "host-a", 0))["lease"] is None, "the store cannot hold one"


def test_status_of_one_that_waits_says_so() -> None:
    waiting = told(State(), on.LeaseHeld("fedcba", "host-b", 2, 5.0))
    assert (waiting["phase"], waiting["reason"], waiting["lease"]) == ("waiting", "host-b runs this job", None)
