"""Killed and resumed: every example of configs/trainers."""

from __future__ import annotations

import pytest

from tests.e2e.machine import Machine
from tests.trainers.harness import Course, Trainer, check, drawn
from tests.trainers.table import TRAINERS

WITH_NOTICE = ("lightning", "transformers")
# On a CPU its first start compiles for minutes; what it made stays.
BY_HAND = ("deepspeed",)


def trainers(*names: str) -> pytest.MarkDecorator:
    """One case for each of these, under its name."""
    marks = {name: [pytest.mark.soak] if name in BY_HAND else [] for name in names}
    cases = [pytest.param(TRAINERS[name], id=name, marks=marks[name]) for name in names]
    return pytest.mark.parametrize("trainer", cases)


@trainers(*(name for name in TRAINERS if name not in WITH_NOTICE))
def test_it_finishes_though_its_trainer_and_its_machine_are_killed(machine: Machine, trainer: Trainer) -> None:
    trainer.require()
    course = Course(trainer, machine, steps=trainer.steps)
    course.run([("trainer", "mid-save"), ("machine", "any")])
    check(course, kills=2)


@trainers(*WITH_NOTICE)
def test_it_finishes_though_its_trainer_is_killed_and_its_machine_taken_away(
    machine: Machine, trainer: Trainer
) -> None:
    trainer.require()
    course = Course(trainer, machine, steps=trainer.steps)
    course.run([("trainer", "mid-save"), ("notice", "any")])
    check(course, kills=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@trainers(*TRAINERS)
def test_twenty_kills(machine: Machine, trainer: Trainer) -> None:
    """Run by hand (-m soak -s): prints what each kind of death cost."""
    trainer.require()
    course = Course(trainer, machine, steps=25 * trainer.steps_per_kill)
    course.run(drawn(20, seed=20))
    for line in check(course, kills=20).told():
        print(line)
