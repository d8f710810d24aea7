"""The quick start job, killed again and again, ends with the very weights of an undisturbed run."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.machine import ROOT, Machine, wait_for

STEPS = 2500
TRAINER_KILLS, SUPERVISOR_KILLS = 20, 5
COMMAND = f"python quickstart/train.py --steps {STEPS} --save-every 25"


def digest(path: Path) -> str:
    """Of every bit of every weight and of the optimizer's state."""
    state = torch.load(path, weights_only=True)
    tensors = [*state["model"].values()]
    tensors += [value for entry in state["optimizer"]["state"].values() for value in entry.values()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sklearn

    folder = tmp_path_factory.mktemp("bucket")
    (folder / "digits").mkdir()
    data = Path(sklearn.__file__).parent / "datasets/data/digits.csv.gz"
    (folder / "digits/digits.csv.gz").write_bytes(data.read_bytes())
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, bucket: Path) -> str:
    """Plain python, no cloudrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    env = {**os.environ, "CLOUDRUN_DATA_DIR": str(bucket / "digits"), "CLOUDRUN_CHECKPOINT_DIR": str(folder)}
    command = [sys.executable, *COMMAND.split()[1:]]
    subprocess.run(command, cwd=ROOT / "configs", env=env, check=True, stdout=subprocess.DEVNULL)
    return digest(folder / f"step-{STEPS}.pt")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("wiped", [False, True], ids=["same disk", "another machine each time"])
def test_killed_again_and_again(machine: Machine, bucket: Path, undisturbed: str, wiped: bool) -> None:
    machine.extra = {"QUICKSTART_BUCKET": str(bucket), "QUICKSTART_STORE": str(machine.store)}
    dice = random.Random(7)
    kills = ["trainer"] * TRAINER_KILLS + ["supervisor"] * SUPERVISOR_KILLS
    dice.shuffle(kills)
    supervisor = submit(machine)
    for victim in kills:
        trainer = wait_for(machine.trainers, 30)[0]
        time.sleep(dice.uniform(0.0, 3.5))
        assert supervisor.poll() is None, f"the job ended before the last kill:\n{machine.output()[-3000:]}"
        if victim == "supervisor":
            supervisor.kill()
            supervisor.wait()
            wait_for(machine.has_no_trainer, 2.0)
            if wiped:
                machine.wipe()
            supervisor = submit(machine)
        else:
            os.kill(trainer, signal.SIGKILL)
            wait_for(lambda: trainer not in machine.trainers(), 5.0)  # noqa: B023 - called at once
    assert supervisor.wait(200) == 0, machine.output()[-3000:]

    assert machine.run("submit", str(ROOT / "configs/quickstart.yaml"), "--quiet").returncode == 0
    pulled = machine.run("checkpoints", "pull", "quickstart", "--to", str(machine.disk / "weights"))
    assert pulled.returncode == 0, pulled.stderr
    assert digest(Path(pulled.stdout.strip())) == undisturbed
    told = machine.status("quickstart")
    assert (told["phase"], told["outcome"], told["step"]) == ("finished", "succeeded", STEPS)
    if not wiped:  # the last words of a machine that vanished may not have reached the store
        assert told["restarts"]["total"] == len(kills)
        assert told["restarts"]["preemptions"] == SUPERVISOR_KILLS


def submit(machine: Machine) -> subprocess.Popen[str]:
    return machine.start(
        "submit",
        "configs/quickstart.yaml",
        "--set", f"command={COMMAND}",
        "--set", "checkpoints.every=1s",
        "--set", "restart.max_without_progress=50",
        "--set", "restart.backoff.first=100ms",
        "--set", "restart.backoff.limit=500ms",
    )  # fmt: skip
