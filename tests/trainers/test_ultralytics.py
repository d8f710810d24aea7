"""Killed and resumed: configs/trainers/ultralytics."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.machine import Machine, wait_for
from tests.trainers.harness import CONFIGS, Course, Trainer, check, drawn

TRAINER = Trainer(
    name="ultralytics",
    folder="runs/squares/weights",
    command="python train.py --project runs --epochs {steps}",
    modules=("ultralytics", "torchvision", "cv2"),
    steps_per_kill=4,
    # Its checkpoints count epochs from 0, its output from 1.
    ahead=2,
)


def test_it_finishes_though_its_trainer_and_its_machine_are_killed(machine: Machine) -> None:
    TRAINER.require()
    course = Course(TRAINER, machine, steps=12)
    course.run([("trainer", "mid-save"), ("machine", "any")])
    check(course, kills=2)


def test_a_training_that_is_complete_already_is_done(machine: Machine) -> None:
    """Killed after its last save: on the next start it says that there is nothing to resume, and fails."""
    TRAINER.require()
    course = Course(TRAINER, machine, steps=2)
    shutil.copytree(CONFIGS / TRAINER.name, course.project)
    script = course.project / "train.py"
    waits = "    import time\n    time.sleep(1000 if trainer.epoch + 1 == trainer.epochs else 0)\n"
    script.write_text(
        script.read_text()
        .replace("\n\n\ndef main", f"\n\n\ndef wait(trainer: Any) -> None:\n{waits}\n\ndef main")
        .replace("    if options.resume:", '    model.add_callback("on_model_save", wait)\n    if options.resume:')
    )
    supervisor = course.submit()
    wait_for(lambda: any(path.name.startswith("step-000000000001.") for path in course.stored()), 90.0)
    course.kill("trainer", "any", supervisor)
    assert supervisor.wait(90.0) == 0, machine.output()[-4000:]
    logs = [log.read_text() for log in machine.disk.glob("state/cloudrun/jobs/*/run-1/logs/a2-*/*.log")]
    assert "nothing to resume" in "".join(logs)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills(machine: Machine) -> None:
    """Run by hand (-m soak -s): prints what each kind of death cost."""
    TRAINER.require()
    course = Course(TRAINER, machine, steps=25 * TRAINER.steps_per_kill)
    course.run(drawn(20, seed=20))
    for line in check(course, kills=20).told():
        print(line)
