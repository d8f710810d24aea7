"""Trainings that are killed at random moments end exactly where they would have ended: weights, optimizer, data."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.killing import Life, finish, kill_at_random, outcome, undisturbed

CASES = [
    ("perceptron", 0, 1),
    ("perceptron", 2, 1),
    ("pictures", 0, 1),
    ("pictures", 2, 1),
    ("pictures", 4, 1),
    ("replayed", 0, 1),
    ("replayed", 2, 1),
    ("transformer", 0, 1),
    ("data parallel", 0, 2),
    ("fully sharded", 0, 2),
]


def _is_exact(tmp_path: Path, life: Life, kills: int, seed: int) -> None:
    expected = undisturbed(life)
    killed = replace(life, folder=tmp_path / "killed")
    ended = kill_at_random(killed, random.Random(seed), kills)
    finish(replace(killed, attempt=kills))
    assert outcome(killed) == expected
    assert ended > 0


@pytest.mark.parametrize(("kind", "workers", "world"), CASES)
def test_a_killed_training_ends_as_if_nothing_had_happened(tmp_path: Path, kind: str, workers: int, world: int) -> None:
    life = Life(kind, tmp_path / "undisturbed", workers=workers, world=world)
    _is_exact(tmp_path, life, kills=2, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "workers", "world"), CASES)
def test_twenty_kills(tmp_path: Path, kind: str, workers: int, world: int) -> None:
    life = Life(kind, tmp_path / "undisturbed", total=200, workers=workers, world=world)
    _is_exact(tmp_path, life, kills=20, seed=2)


def test_the_number_of_workers_makes_no_difference_to_seeded_samples(tmp_path: Path) -> None:
    without, with_two = (undisturbed(Life("pictures", tmp_path / str(count), workers=count)) for count in (0, 2))
    assert without == with_two
