"""The examples in configs/trainers are right as they lie there, and none of their scripts knows of cloudrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.spec import load_spec, not_yet
from tests.trainers.harness import CONFIGS
from tests.trainers.table import TRAINERS

EXAMPLES = sorted(CONFIGS.iterdir())


def test_there_is_one_for_each_trainer_that_is_killed() -> None:
    assert [example.name for example in EXAMPLES] == list(TRAINERS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_is_a_job_that_this_version_runs(example: Path) -> None:
    spec = load_spec(example / "job.yaml", environ=dict(os.environ))
    assert not not_yet(spec)
    assert spec.name == example.name
    assert spec.checkpoints.dir


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_its_script_knows_nothing_of_us(example: Path) -> None:
    code = (example / "train.py").read_text().split('"""')[2]
    assert "cloudrun" not in code.lower()
    assert "runner" not in code
