"""What only configs/trainers/ultralytics has."""

from __future__ import annotations

import shutil

from tests.e2e.machine import Machine, wait_for
from tests.trainers.harness import CONFIGS, Course
from tests.trainers.table import TRAINERS

TRAINER = TRAINERS["ultralytics"]


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
