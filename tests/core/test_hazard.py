"""How long a machine is expected to live, before and after something was seen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.hazard import AGES, losses_seen, mean_life, no_lives, with_life
from runner.core.state import Band

GUESS = 7200.0


def test_before_anything_was_seen_the_guess_holds_at_any_age() -> None:
    assert mean_life((), 0.0, GUESS) == mean_life(no_lives(), 90_000.0, GUESS) == pytest.approx(GUESS)


def test_a_life_is_split_between_the_ages_it_went_through() -> None:
    bands = with_life((), 600.0, 8000.0, lost=True)
    assert bands == (Band(1800.0, 1200.0, 0), Band(7200.0, 5400.0, 0), Band(math.inf, 800.0, 1))
    assert losses_seen(bands) == 1


def test_a_machine_that_is_lost_at_the_edge_of_a_band_counts_once() -> None:
    assert losses_seen(with_life((), 0.0, 1800.0, lost=True)) == 1
    assert losses_seen(with_life((), 0.0, 0.0, lost=True)) == 1


def test_living_on_is_good_news_and_dying_bad() -> None:
    survived = with_life((), 0.0, 50_000.0, lost=False)
    died = with_life((), 0.0, 600.0, lost=True)
    assert mean_life(survived, 0.0, GUESS) > GUESS > mean_life(died, 0.0, GUESS)


def test_one_loss_counts_as_much_as_the_guess() -> None:
    """(1 + 1) losses in (7200 + 1800) seconds at all ages; then two more of that rate, and one in 1800, when young."""
    bands = with_life((), 0.0, 1799.0, lost=True)
    overall = (GUESS + 1799.0) / 2.0
    assert mean_life(bands, 10_000.0, GUESS) == pytest.approx(overall)
    assert mean_life(bands, 0.0, GUESS) == pytest.approx((2.0 * overall + 1799.0) / 3.0)


def test_where_machines_die_young_the_old_ones_may_be_trusted() -> None:
    bands = no_lives()
    for _ in range(30):
        bands = with_life(bands, 0.0, 600.0, lost=True)
    for _ in range(10):
        bands = with_life(bands, 0.0, 40_000.0, lost=True)
    assert mean_life(bands, 0.0, GUESS) < 2000.0
    assert mean_life(bands, 10_000.0, GUESS) > 15_000.0


@pytest.mark.parametrize("life", [900.0, 3600.0, 30_000.0])
def test_with_enough_lives_seen_the_truth_is_found(life: float) -> None:
    """Lives without a memory: at any age a machine has ``life`` seconds to go on average. Quantiles instead of dice."""
    bands = no_lives()
    for number in range(500):
        bands = with_life(bands, 0.0, -life * math.log(1.0 - (number + 0.5) / 500), lost=True)
    assert mean_life(bands, 0.0, GUESS) == pytest.approx(life, rel=0.2)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())))
def test_nothing_that_was_lived_gets_lost(lives: list[tuple[float, float, bool]]) -> None:
    bands = no_lives()
    for begun, more, lost in lives:
        bands = with_life(bands, begun, begun + more, lost=lost)
    assert losses_seen(bands) == sum(lost for _, _, lost in lives)
    seconds = sum(band.seconds for band in bands)
    assert seconds == pytest.approx(sum((begun + more) - begun for begun, more, _ in lives), abs=1e-3)
    assert [band.until for band in bands] == list(AGES)
    assert mean_life(bands, 0.0, GUESS) > 0.0
