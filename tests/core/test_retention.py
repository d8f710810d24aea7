"""What stays and what goes: a table for people, properties for peace of mind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.policy import Best
from runner.core.retention import retain
from runner.core.state import Checkpoint


def checkpoint(step: int, *, time: float = 0.0, name: str = "") -> Checkpoint:
    return Checkpoint(name or f"s{step}", step, f"step-{step}", 1, 1, 10, "sig", time)


def steps(*numbers: int) -> list[Checkpoint]:
    return [checkpoint(number, time=float(number)) for number in numbers]


def said(verdicts: object) -> dict[str, tuple[bool, str]]:
    assert isinstance(verdicts, tuple)
    return {verdict.id: (verdict.keep, verdict.reason) for verdict in verdicts}


def test_the_newest_stay_and_the_others_say_what_replaced_them() -> None:
    assert said(retain(steps(100, 200, 300, 400), last=2)) == {
        "s400": (True, "last 2"),
        "s300": (True, "last 2"),
        "s200": (False, "superseded by step 300"),
        "s100": (False, "superseded by step 300"),
    }


def test_verdicts_come_newest_first() -> None:
    assert [verdict.id for verdict in retain(steps(200, 400, 100), last=1)] == ["s400", "s200", "s100"]


def test_at_least_one_stays_whatever_last_says() -> None:
    assert said(retain(steps(100, 200), last=0))["s200"] == (True, "newest")


def test_the_step_counts_before_the_time() -> None:
    old_but_far = checkpoint(900, time=1.0)
    new_but_near = checkpoint(100, time=2.0)
    assert said(retain([new_but_near, old_but_far], last=1))["s900"][0]


def test_of_one_step_the_later_commit_counts() -> None:
    first, second = checkpoint(5, time=1.0, name="first"), checkpoint(5, time=2.0, name="second")
    assert said(retain([second, first], last=1)) == {
        "second": (True, "newest"),
        "first": (False, "superseded by step 5"),
    }


def test_milestones_are_the_first_at_or_after_each_multiple() -> None:
    kept = said(retain(steps(400, 800, 1200, 1600, 2000, 2400, 2800), last=1, every_steps=1000))
    assert [name for name, (keep, _) in kept.items() if keep] == ["s2800", "s2000", "s1200"]
    assert kept["s1200"] == (True, "milestone every 1000 steps")


def test_milestones_in_time() -> None:
    hourly = [checkpoint(n, time=n * 1800.0) for n in range(1, 7)]
    kept = said(retain(hourly, last=1, every_seconds=3600.0))
    assert [name for name, (keep, _) in kept.items() if keep] == ["s6", "s4", "s2", "s1"]
    assert kept["s2"] == (True, "milestone every 3600 s")


def test_the_one_in_use_stays() -> None:
    assert said(retain(steps(1, 2, 3), last=1, in_use="s1"))["s1"] == (True, "being resumed from")


def test_a_rejected_one_stays_until_enough_good_ones_are_as_new() -> None:
    newest_bad = said(retain(steps(100, 200, 300), last=2, rejected=frozenset({"s300"})))
    assert newest_bad["s300"] == (True, "unusable, but kept until 2 good ones are as new")
    assert newest_bad["s200"] == (True, "last 2")
    oldest_bad = said(retain(steps(100, 200, 300), last=2, rejected=frozenset({"s100"})))
    assert oldest_bad["s100"] == (False, "unusable, superseded by step 300")


def test_with_no_good_one_nothing_goes() -> None:
    verdicts = retain(steps(1, 2, 3), last=1, rejected=frozenset({"s1", "s2", "s3"}))
    assert all(verdict.keep for verdict in verdicts)


@pytest.mark.parametrize("every", [None, 0, -1])
def test_no_milestones_unless_asked(every: int | None) -> None:
    verdicts = retain(steps(1, 2, 3), last=1, every_steps=every, every_seconds=every)
    assert [verdict.keep for verdict in verdicts] == [True, False, False]


def test_nothing_gives_nothing() -> None:
    assert retain([], last=3) == ()


CHECKPOINTS = st.lists(
    st.builds(
        lambda step, time, name: checkpoint(step, time=time, name=name),
        st.integers(0, 50),
        st.floats(0, 1e5),
        st.text("abcdef", min_size=1, max_size=3),
    ),
    max_size=20,
    unique_by=lambda one: one.id,
)


@given(
    checkpoints=CHECKPOINTS,
    last=st.integers(-1, 5),
    every_steps=st.none() | st.integers(1, 20),
    every_seconds=st.none() | st.floats(1, 1e4),
    data=st.data(),
)
def test_properties(
    checkpoints: list[Checkpoint],
    last: int,
    every_steps: int | None,
    every_seconds: float | None,
    data: st.DataObject,
) -> None:
    ids = [one.id for one in checkpoints]
    rejected = frozenset(data.draw(st.sets(st.sampled_from(ids))) if ids else ())
    in_use = data.draw(st.sampled_from([None, *ids]))

    def judged(of: list[Checkpoint]) -> dict[str, bool]:
        verdicts = retain(
            of, last=last, every_steps=every_steps, every_seconds=every_seconds, rejected=rejected, in_use=in_use
        )
        assert all(verdict.reason for verdict in verdicts)
        return {verdict.id: verdict.keep for verdict in verdicts}

    keep = judged(checkpoints)
    assert set(keep) == set(ids)
    good = [one for one in checkpoints if one.id not in rejected]
    newest = sorted(good, key=lambda one: (one.step, one.time, one.id), reverse=True)
    assert all(keep[one.id] for one in newest[: max(1, last)])
    assert in_use is None or keep[in_use]
    assert good or all(keep.values())
    # What stays, stays: judging again what was kept removes nothing more.
    assert all(judged([one for one in checkpoints if keep[one.id]]).values())


def measured(step: int, loss: float | None) -> Checkpoint:
    return replace(checkpoint(step), metrics=() if loss is None else (("loss", loss), ("size", 1.0)))


LOSSES = [measured(100, 0.9), measured(200, 0.4), measured(300, math.nan), measured(400, 0.5), measured(500, None)]


def test_the_best_by_a_metric_stays_and_says_why() -> None:
    kept = said(retain(LOSSES, last=1, best=Best("loss")))
    assert {name: reason for name, (keep, reason) in kept.items() if keep} == {
        "s500": "newest",
        "s200": "best loss (0.4)",
    }


def test_several_best_stay_and_the_mode_says_which_end_is_good() -> None:
    kept = said(retain(LOSSES, last=1, best=Best("loss", "max", last=2)))
    assert {name for name, (keep, _) in kept.items() if keep} == {"s500", "s100", "s400"}


def test_of_equal_values_the_newest_is_the_best() -> None:
    kept = said(retain([measured(1, 0.5), measured(2, 0.5), measured(3, 0.7)], last=1, best=Best("loss")))
    assert {name for name, (keep, _) in kept.items() if keep} == {"s3", "s2"}


def test_a_metric_that_nobody_reports_keeps_nothing_and_loses_nothing() -> None:
    assert retain(LOSSES, last=2, best=Best("accuracy")) == retain(LOSSES, last=2)


def test_a_rejected_best_is_not_kept_as_the_best() -> None:
    kept = said(retain(LOSSES, last=1, best=Best("loss"), rejected=frozenset({"s200"})))
    assert kept["s400"] == (True, "best loss (0.5)")
    assert not kept["s200"][0]


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), min_size=1, max_size=8),
    st.integers(0, 3),
    st.sets(st.integers(0, 7)),
    st.sampled_from(["min", "max"]),
)
def test_with_a_metric_never_under_one_good_one(
    losses: list[float | None], last: int, bad: set[int], mode: Literal["min", "max"]
) -> None:
    all_ = [measured(step, loss) for step, loss in enumerate(losses)]
    rejected = frozenset(f"s{number}" for number in bad)
    kept = {one.id for one in retain(all_, last=last, best=Best("loss", mode), rejected=rejected) if one.keep}
    good = {one.id for one in all_} - rejected
    assert not good or good & kept
    plainly = {one.id for one in retain(all_, last=last, rejected=rejected) if one.keep}
    assert plainly <= kept
    assert len(kept) <= len(plainly) + 1
