"""Killed and resumed: configs/trainers/accelerate."""

from __future__ import annotations

import pytest

from tests.e2e.machine import Machine
from tests.trainers.harness import Course, Trainer, check, drawn

TRAINER = Trainer(
    name="accelerate",
    folder="out",
    command="python train.py --output_dir out --steps {steps} --save_steps 20 --delay 0.025",
    modules=("accelerate",),
)


def test_it_finishes_though_its_trainer_and_its_machine_are_killed(machine: Machine) -> None:
    TRAINER.require()
    course = Course(TRAINER, machine, steps=300)
    course.run([("trainer", "mid-save"), ("machine", "any")])
    check(course, kills=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills(machine: Machine) -> None:
    """Run by hand (-m soak -s): prints what each kind of death cost."""
    TRAINER.require()
    course = Course(TRAINER, machine, steps=25 * TRAINER.steps_per_kill)
    course.run(drawn(20, seed=20))
    for line in check(course, kills=20).told():
        print(line)
