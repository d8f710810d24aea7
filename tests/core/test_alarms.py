"""What a person is told while the job goes on: once, and not without a reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from runner.core import actions as do
from runner.core import events as on
from runner.core.alarms import LEAST_SILENCE, alarms, differences, followed
from runner.core.cadence import LONGEST
from runner.core.decide import decide, wake_at
from runner.core.events import Event
from runner.core.policy import Policy
from runner.core.state import Cadence, Environment, History, Ledger, Losses, Running, Saves, State, Trend, Uploads
from tests.core.matrix import NOW, OURS, RUNNING, SAVED, STORED, checkpoint

AUTO = Policy()
KNOWN = Ledger(OURS, 2, run=1, attempt=2, stored=(STORED,), prepared=True, resumed=STORED)
AT_WORK = replace(KNOWN, saves=Saves(since=NOW))


def warned(actions: tuple[do.Action, ...]) -> list[str]:
    return [action.alarm.text for action in actions if isinstance(action, do.Warn)]


# -- silence -----------------------------------------------------------------------------------------------------------


def test_a_trainer_that_saves_nothing_for_three_intervals_is_told_once() -> None:
    cadence = Cadence(200.0, 10.0, "")
    state = State(RUNNING, replace(AT_WORK, saves=Saves(askable=True, since=NOW, asked_at=NOW), cadence=cadence))
    assert alarms(state, NOW + 599.0) == ()
    state, actions = decide(AUTO, state, on.Woke(), NOW + 600.0)
    assert warned(actions) == ["no complete checkpoint for 10 min: does the trainer hang, or may it not write?"]
    assert wake_at(AUTO, state) > NOW + 600.0
    state, actions = decide(AUTO, state, on.Noticed(""), NOW + 700.0)
    assert warned(actions) == []
    assert [alarm.kind for alarm in state.ledger.alarms] == ["no checkpoint"]


def test_it_is_over_when_a_checkpoint_comes() -> None:
    ledger = replace(AT_WORK, saves=Saves(since=NOW - 10_000.0))
    state, _ = decide(AUTO, State(RUNNING, ledger), on.Noticed(""), NOW)
    assert state.ledger.alarms
    state, actions = decide(AUTO, state, on.CheckpointSaved(2, SAVED), NOW + 1.0)
    assert state.ledger.alarms == ()
    assert warned(actions) == []


def test_a_script_with_a_rhythm_of_its_own_has_three_of_its_intervals() -> None:
    slow = replace(AT_WORK, saves=Saves(since=NOW - 9000.0, last_at=NOW, own_every=3000.0))
    assert alarms(State(RUNNING, slow), NOW + 8999.0) == ()
    [alarm] = alarms(State(RUNNING, slow), NOW + 9000.0)
    assert alarm.text.startswith("no complete new checkpoint for 2.5 h")


def test_before_its_first_save_a_script_has_three_quarters_of_an_hour() -> None:
    assert wake_at(AUTO, State(RUNNING, AT_WORK)) == NOW + 3 * LONGEST


def test_a_trainer_whose_steps_nobody_can_read_is_expected_to_save_as_well() -> None:
    assert wake_at(AUTO, State(RUNNING, KNOWN)) == RUNNING.since + 3 * LONGEST


def test_a_long_start_of_a_trainer_that_can_be_asked_is_no_alarm() -> None:
    ledger = replace(KNOWN, saves=Saves(askable=True), cadence=Cadence(60.0, 10.0, ""))
    assert wake_at(AUTO, State(RUNNING, ledger)) == RUNNING.since + 3 * LONGEST


def test_quick_intervals_do_not_make_a_short_silence_an_alarm() -> None:
    saves = Saves(askable=True, since=NOW, last_at=NOW, begun_at=NOW, asked_at=NOW)
    state = State(RUNNING, replace(AT_WORK, saves=saves, cadence=Cadence(10.0, 10.0, "")))
    assert alarms(state, NOW + LEAST_SILENCE - 1.0) == ()
    assert [alarm.kind for alarm in alarms(state, NOW + LEAST_SILENCE)] == ["no checkpoint"]


def test_what_is_saved_and_not_stored_is_told_with_the_reason() -> None:
    ledger = replace(
        AT_WORK,
        stored=(replace(STORED, time=NOW),),
        local=(SAVED,),
        saves=Saves(since=NOW - 60.0, last_at=NOW + 900.0),
        cadence=Cadence(60.0, 60.0, ""),
        uploads=Uploads(last_at=NOW, seconds=60.0, failures=3, retry_at=math.inf, problem="no answer"),
    )
    state, actions = decide(AUTO, State(RUNNING, ledger), on.Noticed(""), NOW + 359.0)
    assert warned(actions) == []
    assert wake_at(AUTO, state) == NOW + 360.0, "three times a minute's distance and a minute's upload"
    _, actions = decide(AUTO, state, on.Woke(), NOW + 360.0)
    assert warned(actions) == ["no checkpoint was stored for 6 min: no answer"]


def test_a_first_upload_may_take_long() -> None:
    ledger = replace(AT_WORK, local=(SAVED,), uploads=Uploads(current=SAVED, last_at=NOW))
    assert [alarm.kind for alarm in alarms(State(RUNNING, ledger), NOW + 2000.0)] == []


# -- losses ------------------------------------------------------------------------------------------------------------


def life_with(losses: list[float], after: list[float]) -> tuple[State, list[str]]:
    """A trainer reports losses, crashes, is resumed from step 10, and reports those ``after``."""
    state, told, step = State(RUNNING, KNOWN), [], 10
    attempt = 2

    def hears(event: Event) -> None:
        nonlocal state
        state, actions = decide(AUTO, state, event, NOW)
        told.extend(warned(actions))

    for loss in losses:
        step += 1
        hears(on.Progressed(attempt, step, loss=loss))
    hears(on.CheckpointSaved(attempt, checkpoint(step, local=True)))
    hears(on.TrainerExited(attempt, 1))
    hears(on.Restored(attempt + 1, f"local:step-{step}", "/c"))
    assert isinstance(state.phase, Running)
    for loss in after:
        step += 1
        hears(on.Progressed(attempt + 1, step, loss=loss))
    return state, told


CALM = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9, 1.0, 1.0]


def test_a_loss_that_jumps_after_a_resume_is_told() -> None:
    state, told = life_with(CALM, [2.3, 2.4, 2.2, 1.0, 1.0])
    assert told == ["the loss is 2.3 after resuming from step 20, and was 1 before: is the whole state restored?"]
    assert [alarm.kind for alarm in state.ledger.alarms] == ["loss"], "the later, better ones do not make it good"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CALM, [1.1, 0.9, 1.05]),
        (CALM, [2.3, 2.4]),
        (CALM[:5], [9.0, 9.0, 9.0]),
        ([1.0] * 20, [1.02, 1.03, 1.02]),
        ([0.5], [9.0, 9.0, 9.0]),
    ],
    ids=["as before", "too few yet", "too few before", "a smooth one may breathe", "next to nothing before"],
)
def test_what_is_no_jump(before: list[float], after: list[float]) -> None:
    assert life_with(before, after)[1] == []


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_after_a_resume_is_a_jump_and_spoils_no_mean(odd: float) -> None:
    state, told = life_with(CALM, [odd, 1.0, 1.0, 1.0])
    assert len(told) == 1
    assert state.ledger.losses.recent.mean == pytest.approx(1.0)


def test_losses_of_another_machine_count_as_before() -> None:
    state, _ = decide(AUTO, State(), on.Recovered(1, 1, (STORED,), history=History(losses=Trend(50, 1.0, 0.01))), NOW)
    state, _ = decide(AUTO, state, on.Prepared(2), NOW)
    state, _ = decide(AUTO, state, on.Restored(2, STORED.id, "/c"), NOW)
    told = []
    for step, loss in enumerate([3.0, 3.0, 3.0], 11):
        state, actions = decide(AUTO, state, on.Progressed(2, step, loss=loss), NOW)
        told += warned(actions)
    assert len(told) == 1


def test_an_attempt_that_told_next_to_nothing_leaves_what_was_known() -> None:
    state, _ = life_with(CALM, [1.0])
    before = state.ledger.losses.before
    state, _ = decide(AUTO, state, on.TrainerExited(3, -9), NOW)
    state, _ = decide(AUTO, state, on.Woke(), NOW + 100.0)
    state, _ = decide(AUTO, state, on.Restored(4, "local:step-20", "/c"), NOW + 101.0)
    assert isinstance(state.phase, Running)
    assert state.ledger.losses == Losses(before=before)


def test_a_trend_is_the_mean_at_first_and_forgets_later() -> None:
    trend = Trend()
    for figure in (1.0, 2.0, 3.0):
        trend = followed(trend, figure)
    assert trend.count == 3
    assert trend.mean == pytest.approx(2.0)
    assert trend.variance == pytest.approx(2.0 / 3.0)
    for _ in range(200):
        trend = followed(trend, 9.0)
    assert trend.mean == pytest.approx(9.0)
    assert trend.variance == pytest.approx(0.0, abs=0.01)


# -- the environment ---------------------------------------------------------------------------------------------------


def test_what_bits_depend_on_is_compared_with_the_checkpoint() -> None:
    made = replace(STORED, environment=Environment(world=8, threads=4, cpu="AVX512"))
    state = State(RUNNING, replace(KNOWN, stored=(made,), resumed=made))
    _, actions = decide(AUTO, state, on.TrainerJoined(2, Environment(8, 4, "AVX512")), NOW)
    assert warned(actions) == []
    _, actions = decide(AUTO, state, on.TrainerJoined(2, Environment(4, 4, "AVX2")), NOW)
    changes = "the number of ranks was 8 and is 4; the CPU instruction set was AVX512 and is AVX2"
    assert warned(actions) == [f"{changes}: training is not exact any more"]


def test_what_nobody_knows_has_not_changed() -> None:
    assert differences(Environment(world=8), Environment(threads=4)) == ()
