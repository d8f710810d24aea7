"""The quick start job, killed again and again, ends with the very weights of an undisturbed run."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runner.storage.access import Access
from runner.storage.opening import open_store
from runner.storage.retrying import Retry
from tests.e2e.machine import ROOT, Machine, wait_for
from tests.servers import Server
from tests.servers.obs import ObsServer

STEPS = 2500
TRAINER_KILLS, SUPERVISOR_KILLS = 20, 5
DATA = "digits/digits.csv.gz"
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
    (folder / DATA).write_bytes(data.read_bytes())
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
    # Another machine cannot know that the one before is dead, and waits for its lease to expire.
    kill_and_compare(machine, undisturbed, TRAINER_KILLS, 3 if wiped else SUPERVISOR_KILLS, wiped=wiped)


@pytest.mark.timeout(400)
def test_killed_again_and_again_on_s3(
    machine: Machine, bucket: Path, undisturbed: str, seaweedfs: Server, fresh_bucket: Callable[[Server], str]
) -> None:
    name = fresh_bucket(seaweedfs)
    machine.extra = {**in_the_cloud(f"s3://{name}"), **seaweedfs.environ(), "AWS_ENDPOINT_URL": seaweedfs.endpoint}
    seaweedfs.client().upload_file(str(bucket / DATA), name, f"data/{DATA}")
    kill_and_compare(machine, undisturbed, 4, 2, wiped=True)


@pytest.mark.timeout(400)
def test_killed_again_and_again_on_obs(
    machine: Machine, bucket: Path, undisturbed: str, obs: ObsServer, fresh_bucket: Callable[[ObsServer], str]
) -> None:
    name = fresh_bucket(obs)
    machine.extra = {**in_the_cloud(f"obs://{name}"), **obs.environ(), "OBS_ENDPOINT": obs.endpoint}
    access = Access(endpoint=obs.endpoint, environ=obs.environ())
    open_store(f"obs://{name}", access, Retry(5)).upload(bucket / DATA, f"data/{DATA}")
    kill_and_compare(machine, undisturbed, 3, 1, wiped=True)


def in_the_cloud(bucket: str) -> dict[str, str]:
    return {"QUICKSTART_STORE": "/unused", "QUICKSTART_BUCKET": "/unused", "TEST_BUCKET": bucket}


def kill_and_compare(
    machine: Machine, undisturbed: str, trainer_kills: int, supervisor_kills: int, *, wiped: bool
) -> None:
    """Kill both in random order, at random moments; the job must end as if nothing had been."""
    dice = random.Random(7)
    kills = ["trainer"] * trainer_kills + ["supervisor"] * supervisor_kills
    dice.shuffle(kills)
    supervisor = submit(machine)
    for victim in kills:
        trainer = wait_for(machine.trainers, 60)[0]
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

    assert machine.run("submit", "configs/quickstart.yaml", "--quiet", *where(machine)).returncode == 0
    pulled = machine.run("checkpoints", "pull", "quickstart", "--to", str(machine.disk / "weights"))
    assert pulled.returncode == 0, pulled.stderr
    assert digest(Path(pulled.stdout.strip())) == undisturbed
    told = machine.status("quickstart")
    assert (told["phase"], told["outcome"], told["step"]) == ("finished", "succeeded", STEPS)
    if not wiped:  # the last words of a machine that vanished may not have reached the store
        assert told["restarts"]["total"] == len(kills)
        assert told["restarts"]["preemptions"] == supervisor_kills


def submit(machine: Machine) -> subprocess.Popen[str]:
    return machine.start(
        "submit",
        "configs/quickstart.yaml",
        *where(machine),
        "--set", f"command={COMMAND}",
        "--set", "checkpoints.every=1s",
        "--set", "restart.max_without_progress=50",
        "--set", "restart.backoff.first=100ms",
        "--set", "restart.backoff.limit=500ms",
    )  # fmt: skip


def where(machine: Machine) -> tuple[str, ...]:
    """The spec's store and data, when they are in the cloud."""
    bucket = machine.extra.get("TEST_BUCKET")
    if bucket is None:
        return ()
    return ("--set", f"store={bucket}/jobs", "--set", f"data=[{{source: '{bucket}/data/digits/'}}]")
