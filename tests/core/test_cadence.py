"""How often to save and to upload, and when a trainer is asked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core import actions as do
from runner.core import events as on
from runner.core.cadence import FIRST_SAVE, LONGEST, SHORTEST, Prospects, next_ask, next_upload, rounded, weigh, words
from runner.core.decide import decide, wake_at
from runner.core.events import Event
from runner.core.policy import Policy
from runner.core.state import (
    NO_HISTORY,
    Band,
    Cadence,
    Checkpoint,
    Deadline,
    History,
    Ledger,
    Running,
    State,
    Stopping,
    Trend,
    Uploads,
    Waiting,
)
from tests.core.matrix import NOW, STORED, TERM, checkpoint

AUTO = Policy()
SEEN = Prospects(cost=0.5, upload=10.0, life=7200.0, losses=3)


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_the_interval_is_the_root_of_twice_cost_times_life() -> None:
    told = weigh(AUTO, SEEN)
    assert told.save_every == rounded(math.sqrt(2 * 0.5 * 7200)) == 85.0
    assert told.reason == "every 85 s: a save costs 0.5 s, a machine like this one lives 2.0 h (3 seen lost)"


def test_a_guess_is_called_a_guess() -> None:
    assert "(a guess, none seen lost yet)" in weigh(AUTO, replace(SEEN, losses=0)).reason


def test_never_sooner_than_an_upload_takes() -> None:
    told = weigh(AUTO, replace(SEEN, upload=200.0))
    assert (told.save_every, told.upload_every) == (200.0, 200.0)
    assert told.reason.endswith("not sooner than an upload, which takes 3 min")


def test_saves_never_take_more_than_a_tenth() -> None:
    told = weigh(AUTO, replace(SEEN, cost=60.0, life=1000.0))
    assert told.save_every == 600.0
    assert told.reason.endswith("not sooner, so that saves stay cheap")


def test_never_later_than_a_quarter_of_an_hour_unless_an_upload_takes_longer() -> None:
    told = weigh(AUTO, replace(SEEN, cost=20.0, life=1e6))
    assert told.save_every == LONGEST
    assert told.reason.endswith("never later")
    assert weigh(AUTO, replace(SEEN, upload=3600.0)).save_every == 3600.0


def test_before_a_save_was_measured_the_first_comes_soon() -> None:
    assert weigh(AUTO, replace(SEEN, cost=None)).save_every == FIRST_SAVE


def test_an_interval_of_the_owner_is_obeyed() -> None:
    told = weigh(Policy(upload_every=600.0), replace(SEEN, cost=None))
    assert told == Cadence(600.0, 600.0, "every 10 min, as the job spec says")


@given(
    st.floats(0.0, 1e4), st.floats(0.0, 1e4), st.floats(1.0, 1e8), st.integers(0, 9)
)  # fmt: skip
def test_every_verdict_is_within_its_bounds(cost: float, upload: float, life: float, losses: int) -> None:
    told = weigh(AUTO, Prospects(cost, upload, life, losses))
    assert max(SHORTEST, upload) <= told.save_every <= max(LONGEST, upload)
    assert told.reason


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.123, "0.12 s"), (9.5, "9.5 s"), (42.4, "42 s"), (119.0, "119 s"), (600.0, "10 min"), (7200.0, "2.0 h")],
)
def test_lengths_of_time_in_words(seconds: float, told: str) -> None:
    assert words(seconds) == told


# -- when a trainer is asked -------------------------------------------------------------------------------------------


class Life:
    """A session whose trainer has joined at NOW and made its first step a second later."""

    def __init__(self, policy: Policy = AUTO, history: History = NO_HISTORY, *, askable: bool = True) -> None:
        self.policy, self.state, self.now = policy, State(), NOW
        self.does(on.Started(), 0.0)
        self.does(on.LeaseTaken("s", "h", 1), 0.0)
        self.does(on.Recovered(1, 1, history=history), 0.0)
        self.does(on.Prepared(2), 0.0)
        self.does(on.TrainerStarted(2, 42, "train"), 0.0)
        if askable:
            self.does(on.TrainerJoined(2), 0.0)

    def does(self, event: Event, after: float) -> list[do.Action]:
        self.now += after
        self.state, actions = decide(self.policy, self.state, event, self.now)
        return [one for one in actions if isinstance(one, do.AskSave | do.Upload | do.Warn)]

    def wakes(self) -> list[do.Action]:
        return self.does(on.Woke(), wake_at(self.policy, self.state) - self.now)

    def saves(self, step: int, after: float, stall: float | None = 0.5, persist: float = 2.0) -> list[do.Action]:
        saved = replace(checkpoint(step, local=True), time=self.now + after)
        return self.does(on.CheckpointSaved(2, saved, stall=stall, persist=persist), after)


def stored(local: Checkpoint) -> Event:
    return on.Uploaded(local.id, replace(local, id=local.name), 4.0)


def test_a_trainer_is_asked_early_and_then_at_its_time() -> None:
    life = Life()
    assert life.state.ledger.cadence is not None
    assert next_ask(life.state).at == math.inf, "there is nothing to save before the first step"
    assert life.does(on.Progressed(2, 1), 1.0) == []
    [ask] = life.wakes()
    assert isinstance(ask, do.AskSave)
    assert (life.now, ask.attempt, ask.deadline) == (NOW + 1.0 + FIRST_SAVE, 2, None)
    assert life.does(on.Progressed(2, 50), 1.0) == [], "asked once"
    [upload] = life.saves(60, after=1.5)
    assert isinstance(upload, do.Upload)
    assert life.does(stored(upload.checkpoint), 4.0) == []
    [ask] = life.wakes()
    assert life.now == NOW + 1.0 + FIRST_SAVE + 85.0, "counted from asking to asking"
    assert isinstance(ask, do.AskSave)
    assert ask.reason.startswith("every 85 s: a save costs 0.5 s")


def test_a_trainer_that_has_not_joined_is_never_asked() -> None:
    life = Life(askable=False)
    life.does(on.Progressed(2, 1), 1.0)
    assert next_ask(life.state).at == math.inf


def test_a_save_of_its_own_puts_off_the_next_request() -> None:
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.saves(5, after=30.0)
    assert next_ask(life.state).at == NOW + 31.0 - 2.5 + 85.0, "from its beginning on"


def test_what_earlier_machines_measured_is_known_at_once() -> None:
    life = Life(history=History((Band(math.inf, 36_000.0, 9),), cost=2.0, persist=3.0, upload=7.0))
    cadence, saves = life.state.ledger.cadence, life.state.ledger.saves
    assert cadence is not None
    assert (saves.cost, saves.persist, life.state.ledger.uploads.seconds) == (2.0, 3.0, 7.0)
    life_expected = (2 * (43_200 / 10) + 36_000) / (2 + 9)
    assert cadence.save_every == rounded(math.sqrt(2 * 2.0 * life_expected))


def test_a_takeover_without_a_history_forgets_nothing() -> None:
    life = Life(history=History(cost=2.0, persist=3.0, upload=7.0, losses=Trend(9, 1.0, 0.1)))
    state = State(Waiting(), life.state.ledger)
    state, _ = decide(AUTO, state, on.Recovered(1, 2), life.now)
    ledger = state.ledger
    assert (ledger.saves.cost, ledger.saves.persist, ledger.uploads.seconds) == (2.0, 3.0, 7.0)
    assert ledger.losses.before == Trend(9, 1.0, 0.1)


def test_a_trainer_that_does_not_answer_is_asked_again_in_a_while() -> None:
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.wakes()
    asked = life.now
    [again] = life.wakes()
    assert isinstance(again, do.AskSave)
    assert life.now == asked + 3 * FIRST_SAVE
    assert again.reason == "the last request was not answered"


def test_where_nobody_measures_the_time_to_the_answer_is_the_cost() -> None:
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.wakes()
    life.saves(60, after=20.0, stall=None)
    assert life.state.ledger.saves.cost == pytest.approx(20.0)
    while life.state.ledger.saves.asked_at is None:
        life.wakes()
    life.saves(70, after=30.0, stall=None)
    assert life.state.ledger.saves.cost == pytest.approx(23.0), "one odd save is no new truth"


def test_a_slow_down_is_part_of_the_cost() -> None:
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.does(on.CheckpointSaved(2, checkpoint(5, local=True), stall=0.5, slowdown=1.5), 9.0)
    assert life.state.ledger.saves.cost == 2.0


def test_what_was_measured_outlives_the_attempt_and_the_right_to_ask_does_not() -> None:
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.saves(5, after=30.0)
    life.does(on.TrainerExited(2, 1), 10.0)
    life.does(on.Restored(3, "local:step-5", "/c"), 1.0)
    assert isinstance(life.state.phase, Running)
    saves = life.state.ledger.saves
    assert (saves.cost, saves.askable, saves.since, saves.last_at) == (0.5, False, None, None)


def test_crashes_count_among_the_losses() -> None:
    life = Life()
    for attempt in (2, 3):
        life.does(on.Progressed(attempt, 10 * attempt), 1.0)
        saved = checkpoint(10 * attempt, local=True)
        life.does(on.CheckpointSaved(attempt, saved, stall=0.5), 1.0)
        calm = life.state.ledger.cadence
        life.does(on.TrainerExited(attempt, 1), 1.0)
        life.does(on.Restored(attempt + 1, saved.id, "/c"), 1.0)
        life.does(on.TrainerStarted(attempt + 1, 42, "train"), 1.0)
        assert calm is not None
        assert life.state.ledger.cadence is not None
        assert life.state.ledger.cadence.save_every < calm.save_every


def test_who_was_told_to_stop_is_not_asked() -> None:
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.does(on.StopRequested(TERM), 1.0)
    assert isinstance(life.state.phase, Stopping)
    assert next_ask(life.state).at == math.inf


# -- deadlines ---------------------------------------------------------------------------------------------------------


def with_deadline(at: float) -> Life:
    """A save took 0.5 + 2 s, its upload 4 s: half as long again and half a minute before the end is the last moment."""
    life = Life(history=History(cost=0.5, persist=2.0, upload=4.0))
    life.does(on.Progressed(2, 1), 1.0)
    life.does(on.DeadlineKnown("lease", at, "the end of the lease"), 0.0)
    return life


def test_before_a_known_deadline_a_save_comes_first() -> None:
    end = NOW + 100.0
    life = with_deadline(end)
    [ask] = life.wakes()
    assert life.now == end - 1.5 * 6.5 - 30.0
    assert ask == do.AskSave(2, "before the end of the lease", end)
    [upload] = life.saves(20, after=2.0)
    assert isinstance(upload, do.Upload)
    assert next_ask(life.state).at == end - 39.75 + 85.0, "once"


def test_a_deadline_that_is_near_makes_us_ask_at_once() -> None:
    life = Life(history=History(cost=0.5))
    life.does(on.Progressed(2, 1), 1.0)
    life.now += 60.0
    [ask] = life.does(on.DeadlineKnown("freeze", life.now + 5.0, "a freeze of the host"), 0.0)
    assert isinstance(ask, do.AskSave)
    assert ask.deadline == life.now + 5.0


def test_a_deadline_that_is_called_off_is_forgotten() -> None:
    life = with_deadline(NOW + 100.0)
    life.does(on.DeadlineKnown("lease", None, ""), 1.0)
    assert life.state.ledger.deadlines == ()
    assert next_ask(life.state).at == NOW + 1.0 + 85.0


def test_the_save_before_a_deadline_does_not_wait_for_its_turn_to_be_uploaded() -> None:
    policy = Policy(upload_every=600.0)
    life = Life(policy, History(cost=0.5, persist=2.0, upload=4.0))
    life.does(on.Progressed(2, 1), 1.0)
    [first] = life.saves(5, after=1.0)
    assert isinstance(first, do.Upload)
    life.does(stored(first.checkpoint), 4.0)
    assert life.saves(10, after=10.0) == [], "its turn comes in ten minutes"
    life.does(on.DeadlineKnown("limit", NOW + 200.0, "the runtime limit"), 1.0)
    [ask] = life.wakes()
    assert isinstance(ask, do.AskSave)
    [second] = life.saves(20, after=2.0)
    assert isinstance(second, do.Upload)
    assert second.checkpoint.step == 20


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_a_script_that_saves_by_itself_is_uploaded_as_it_saves_but_not_without_end() -> None:
    life = Life(askable=False)
    life.does(on.Progressed(2, 1), 1.0)
    [first] = life.saves(5, after=1.0, stall=None, persist=0.0)
    assert isinstance(first, do.Upload)
    life.does(on.Uploaded(first.checkpoint.id, replace(first.checkpoint, id="step-5"), 40.0), 40.0)
    assert life.saves(6, after=0.0, stall=None, persist=0.0) != [], "an upload may follow the last at once"
    state = replace(life.state, ledger=replace(life.state.ledger, uploads=Uploads(last_at=life.now, seconds=40.0)))
    assert wake_at(AUTO, state) <= life.now + 40.0


def test_a_stored_checkpoint_is_the_base_of_nothing_in_another_attempt() -> None:
    """A checkpoint of an attempt that is over is a fact, but no answer to a request."""
    life = Life()
    life.does(on.Progressed(2, 1), 1.0)
    life.wakes()
    asked = life.state.ledger.saves.asked_at
    life.does(on.CheckpointSaved(1, replace(STORED, signature="late")), 1.0)
    assert life.state.ledger.saves.asked_at == asked


def test_a_deadline_does_not_make_a_store_that_just_failed_be_asked_sooner() -> None:
    ledger = Ledger(
        cadence=Cadence(60.0, 600.0, ""),
        deadlines=(Deadline("spot", NOW + 40.0, "the end"),),
        uploads=Uploads(last_at=NOW - 5.0, seconds=10.0, retry_at=NOW + 8.0),
    )
    assert next_upload(Policy(), ledger, replace(checkpoint(12), time=NOW)) == NOW + 8.0
