"""The hook that hands a checkpoint to trainers whose scripts take none, in the processes of real libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.launch.inject import FOLDER, with_hook
from tests.e2e.machine import Machine
from tests.trainers.harness import CONFIGS, ON_CPU, PYTHON, Course, Trainer, check

TRANSFORMERS = Trainer("transformers", "out", "", ("transformers", "accelerate"))
LIGHTNING = Trainer("lightning", "out", "python train.py --steps {steps} --save_steps 20 --delay 0.025", ("lightning",))


def run(folder: Path, *words: str, python: str = PYTHON, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process with the hook first on its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDRUN_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": with_hook(str(ON_CPU)), **variables}
    return subprocess.run([python, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def first_step(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stderr[-3000:]
    return next(int(line.split()[1].partition("/")[0]) for line in done.stdout.splitlines() if line.startswith("step "))


def test_transformers_goes_on_from_what_it_was_given_to_the_same_bits(tmp_path: Path) -> None:
    TRANSFORMERS.require()
    shutil.copy(CONFIGS / "transformers/train.py", tmp_path)
    assert first_step(run(tmp_path, "train.py", "--steps", "30")) == 1
    whole = (tmp_path / "out/model.safetensors").read_bytes()
    for number in (20, 30):
        shutil.rmtree(tmp_path / f"out/checkpoint-{number}")
    # What the trainer itself would choose, and die of.
    (tmp_path / "out/checkpoint-30").mkdir()
    done = run(tmp_path, "train.py", "--steps", "30", CLOUDRUN_RESUME_FROM=str(tmp_path / "out/checkpoint-10"))
    assert first_step(done) == 11
    assert f"cloudrun: Trainer.train goes on from {tmp_path}/out/checkpoint-10" in done.stderr
    assert (tmp_path / "out/model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_goes_on_from_what_it_was_given(tmp_path: Path, package: str) -> None:
    Trainer("lightning", "out", "", (package.partition(".")[0],)).require()
    script = (CONFIGS / "lightning/train.py").read_text().replace("lightning.pytorch", package)
    (tmp_path / "train.py").write_text(script)
    assert first_step(run(tmp_path, "train.py", "--steps", "20")) == 1
    saved = str(tmp_path / "out/epoch=0-step=10.ckpt")
    done = run(tmp_path, "train.py", "--steps", "20", CLOUDRUN_RESUME_FROM=saved)
    assert first_step(done) == 11
    assert f"cloudrun: Trainer.fit goes on from {saved}" in done.stderr


def test_what_the_script_names_itself_stands(tmp_path: Path) -> None:
    LIGHTNING.require()
    shutil.copy(CONFIGS / "lightning/train.py", tmp_path)
    run(tmp_path, "train.py", "--steps", "20")
    own, ours = (str(tmp_path / f"out/epoch=0-step={step}.ckpt") for step in (10, 20))
    done = run(tmp_path, "train.py", "--steps", "30", "--ckpt_path", own, CLOUDRUN_RESUME_FROM=ours)
    assert first_step(done) == 11
    assert "cloudrun" not in done.stderr


def test_a_job_that_asks_for_it_goes_on_though_its_script_takes_no_path(machine: Machine) -> None:
    LIGHTNING.require()
    course = Course(
        LIGHTNING, machine, steps=300, more=("checkpoints={dir: out, every: 200ms, keep: {last: 1000}, inject: true}",)
    )
    course.run([("trainer", "mid-save"), ("machine", "any")])
    check(course, kills=2)


# -- in any Python -----------------------------------------------------------------------------------------------------

CALLS = """
from transformers.trainer import Trainer
trainer = Trainer()
print(trainer.train(), trainer.train(), Trainer().train(resume_from_checkpoint=True))
"""
TRAINER = """
class Trainer:
    def train(self, resume_from_checkpoint=None, **more):
        return resume_from_checkpoint
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Where a script finds a package with the name of a known one, written by the test."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").touch()
    (tmp_path / "transformers/trainer.py").write_text(TRAINER)
    (tmp_path / "script.py").write_text(CALLS)
    return tmp_path


def test_only_the_first_call_is_given_it(project: Path) -> None:
    """The second training of a script is another one: the checkpoint is not its own."""
    done = run(project, "script.py", python=sys.executable, CLOUDRUN_RESUME_FROM="/saves/checkpoint-7")
    assert done.stdout == "/saves/checkpoint-7 None True\n"
    assert done.stderr == "cloudrun: Trainer.train goes on from /saves/checkpoint-7\n"


@pytest.mark.parametrize("argument", ["True", "'la' + 'st'", "None"])
def test_a_choice_left_to_the_trainer_is_made_for_it(project: Path, argument: str) -> None:
    code = f"from transformers.trainer import Trainer; print(Trainer().train({argument}))"
    done = run(project, "-c", code, python=sys.executable, CLOUDRUN_RESUME_FROM="/saves/checkpoint-7")
    assert done.stdout == "/saves/checkpoint-7\n"


@pytest.mark.parametrize("argument", ["False", "'/own'"])
def test_a_choice_of_the_script_stands(project: Path, argument: str) -> None:
    code = f"from transformers.trainer import Trainer; print(Trainer().train({argument}))"
    done = run(project, "-c", code, python=sys.executable, CLOUDRUN_RESUME_FROM="/saves/checkpoint-7")
    assert done.stdout == argument.strip("'") + "\n"
    assert not done.stderr


def test_with_nothing_to_resume_nothing_is_changed(project: Path) -> None:
    done = run(project, "script.py", python=sys.executable, CLOUDRUN_RESUME_FROM="")
    assert done.stdout == "None None True\n"
    assert not done.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "has no attribute 'Trainer'"),
        ("class Trainer:\n    def train(self): return 'as ever'\n", "takes no resume"),
    ],
)
def test_a_library_that_is_not_as_expected_breaks_no_script(project: Path, body: str, words: str) -> None:
    (project / "transformers/trainer.py").write_text(body)
    code = "import transformers.trainer as t; print(getattr(t, 'Trainer', None) and t.Trainer().train())"
    done = run(project, "-c", code, python=sys.executable, CLOUDRUN_RESUME_FROM="/saves/checkpoint-7")
    assert done.returncode == 0
    assert done.stdout in ("as ever\n", "None\n")
    assert words in done.stderr
    assert done.stderr.count("cloudrun: ") == 1


def test_a_call_with_wrong_arguments_fails_as_it_would_without_us(project: Path) -> None:
    code = "from transformers.trainer import Trainer; Trainer().train(1, 2)"
    done = run(project, "-c", code, python=sys.executable, CLOUDRUN_RESUME_FROM="/saves/checkpoint-7")
    assert "takes from 1 to 2 positional arguments but 3 were given" in done.stderr


@pytest.mark.parametrize("resume", ["", "/saves/checkpoint-7"])
def test_the_users_own_site_customisation_still_runs(tmp_path: Path, resume: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\nNAME = 'mine'\n")
    path = with_hook(str(tmp_path))
    code = "import sitecustomize; print(sitecustomize.NAME)"
    done = run(tmp_path, "-c", code, python=sys.executable, PYTHONPATH=path, CLOUDRUN_RESUME_FROM=resume)
    assert (done.stdout, done.stderr) == ("mine\nmine\n", "")


def test_a_site_customisation_that_fails_fails_as_it_would_without_us(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    ours = run(tmp_path, "-c", "print(1)", python=sys.executable, PYTHONPATH=with_hook(str(tmp_path)))
    alone = run(tmp_path, "-c", "print(1)", python=sys.executable, PYTHONPATH=str(tmp_path))
    assert ours.stdout == alone.stdout == "1\n"
    assert "RuntimeError: mine" in alone.stderr
    assert ours.stderr == alone.stderr


def test_no_path_before_leaves_no_empty_part() -> None:
    """It would be the working directory, from which Python would then import."""
    assert with_hook("") == str(FOLDER)
    assert with_hook("/mine") == f"{FOLDER}{os.pathsep}/mine"
