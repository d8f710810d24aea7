"""Thousands of machine lives, none of which may break a promise."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.core.policy import Keep, Policy
from tests.core.world import BrokenPromise, Faults, World

KINDS = {
    "calm": Faults(),
    "crashing": Faults(crash=0.03),
    "hanging": Faults(hang=0.02, deaf=0.3),
    "vanishing machines": Faults(kill_supervisor=0.9, notice=0.6),
    "vanishing machines, same disk": Faults(kill_supervisor=0.9, new_machine=0.0),
    "refusing store": Faults(upload_fails=0.5, recover_fails=0.1),
    "rotting store": Faults(corrupt=0.2, kill_supervisor=0.5),
    "poisoned checkpoints": Faults(poison=0.1, crash=0.02),
    "impatient people": Faults(stop=0.9, deaf=0.5),
    "trainers that can be asked": Faults(askable=1.0, crash=0.01, deaf=0.1, notice=0.3),
    "machines of many kinds": Faults(askable=0.7, lives=(200.0, 1500.0, 10_000.0)),
    "everything": Faults(
        askable=0.5, lives=(300.0, 3000.0), crash=0.01, hang=0.005, kill_supervisor=0.4, notice=0.3, stop=0.3,
        upload_fails=0.2, upload_hopeless=0.02,
        corrupt=0.05, poison=0.03, deaf=0.3, recover_fails=0.05,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_promise_is_broken(kind: str) -> None:
    lives, endings = 0, []
    for seed in range(150):
        policy = Policy() if seed % 3 == 0 else None
        world = World(seed, KINDS[kind], policy)
        endings.append(world.run().exit_code)
        lives += world.lives
    assert lives >= 150
    assert endings.count(0) > 0, f"nothing ever succeeds: {endings}"


PAIRS = {
    "calm": Faults(),
    "vanishing machines": Faults(kill_supervisor=0.9),
    "vanishing machines, same disk": Faults(kill_supervisor=0.9, new_machine=0.0),
    "impatient people": Faults(stop=0.9, deaf=0.5),
    "notices": Faults(notice=0.7),
    "freezing machines": Faults(freeze=0.9, straggle=0.3),
    "cut lines": Faults(cut=0.9, straggle=0.3),
    "trainers that start over": Faults(start_over=0.3, kill_supervisor=0.7, new_machine=0.0),
    "everything": replace(KINDS["everything"], freeze=0.3, cut=0.3, straggle=0.3, start_over=0.05),
}


@pytest.mark.parametrize("machines", [2, 3])
@pytest.mark.parametrize("kind", PAIRS)
def test_no_promise_is_broken_by_several_machines(kind: str, machines: int) -> None:
    endings, takeovers = [], 0
    for seed in range(25):
        world = World(seed, PAIRS[kind], machines=machines)
        endings.append(world.run().exit_code)
        takeovers += world.takeovers
    assert endings.count(0) > 0, f"nothing ever succeeds: {endings}"
    assert takeovers >= 25, "whoever stands by at the end takes the lease, and finds the job done"


def test_a_calm_job_takes_one_life() -> None:
    world = World(0, Faults())
    assert world.run().exit_code == 0
    assert world.lives == 1


def test_trainers_that_can_be_asked_are_asked() -> None:
    """The first time soon, then as the cadence says; in a world of a quarter of an hour that is not often."""
    world = World(0, Faults(askable=1.0), Policy())
    assert world.run().exit_code == 0
    assert 3 <= world.asked <= 20


def test_a_job_without_patience_gives_up_and_says_why() -> None:
    world = World(1, Faults(crash=1.0, budget=1000), Policy(max_without_progress=2))
    ending = world.run()
    assert ending.exit_code == 70
    assert "2 attempt(s) in a row added no checkpoint" in ending.reason


def test_a_hanging_job_ends_as_stalled() -> None:
    ending = World(1, Faults(hang=1.0, budget=1000)).run()
    assert (ending.outcome, ending.exit_code) == ("stalled", 71)


chances = st.sampled_from([0.0, 0.01, 0.05, 0.2])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.builds(
        Faults,
        crash=chances, hang=chances, kill_supervisor=st.sampled_from([0.0, 0.5, 1.0]), notice=chances, stop=chances,
        upload_fails=chances, upload_hopeless=chances, corrupt=chances, poison=chances,
        deaf=st.sampled_from([0.0, 1.0]), recover_fails=chances, freeze=chances, cut=chances,
        straggle=st.sampled_from([0.0, 1.0]), start_over=chances, askable=st.sampled_from([0.0, 0.5, 1.0]),
        lives=st.sampled_from([(), (100.0, 5000.0)]), budget=st.integers(0, 30),
    ),
    st.builds(
        Policy,
        upload_every=st.sampled_from([None, 0.0, 10.0, 300.0]),
        grace=st.sampled_from([0.0, 10.0, 120.0]),
        max_without_progress=st.integers(1, 5),
        keep=st.builds(Keep, last=st.integers(1, 3)),
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_any_world(seed: int, faults: Faults, policy: Policy, machines: int) -> None:
    World(seed, faults, policy, machines).run()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak() -> None:
    """Run by hand (-m soak): as many worlds as ten minutes allow, every kind of trouble at once. Prints how many."""
    dice, worlds, lives = Random(), 0, 0
    give_up = time.monotonic() + 600
    while time.monotonic() < give_up:
        seed = dice.randrange(2**32)
        world = World(seed, any_faults(dice), any_policy(dice), dice.randint(1, 3))
        try:
            world.run()
        except BrokenPromise as broken:
            raise AssertionError(
                f"seed {seed}, {len(world.machines)} machines, {world.faults}, {world.policy}"
            ) from broken
        worlds, lives = worlds + 1, lives + world.lives
    print(f"{worlds} worlds, {lives} machine lives, no promise broken")


def any_faults(dice: Random) -> Faults:
    chance = dice.choice
    few, half = [0.0, 0.01, 0.05, 0.2], [0.0, 0.5, 1.0]
    return Faults(
        crash=chance(few), hang=chance(few), kill_supervisor=chance(half), new_machine=chance(half),
        notice=chance(half), withdraw=dice.random(), stop=chance(half), upload_fails=chance(few),
        upload_hopeless=chance(few), corrupt=chance(few), poison=chance(few), deaf=chance(half),
        recover_fails=chance(few), freeze=chance(half), cut=chance(half), straggle=chance(half), start_over=chance(few),
        askable=chance(half), lives=chance([(), (100.0, 5000.0)]), budget=dice.randint(0, 40),
    )  # fmt: skip


def any_policy(dice: Random) -> Policy:
    return Policy(
        upload_every=dice.choice([None, 0.0, 10.0, 300.0]),
        grace=dice.choice([0.0, 10.0, 120.0]),
        max_without_progress=dice.randint(1, 5),
        keep=Keep(last=dice.randint(1, 3)),
    )
