"""The quick start's training script, without cloudrun: killed at any moment, it ends with the same weights."""

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

from runner.spec import load_spec

ROOT = Path(__file__).parents[2]
STEPS = 300
COMMAND = [
    *(sys.executable, str(ROOT / "configs" / "quickstart" / "train.py")),
    *("--steps", str(STEPS), "--save-every", "20", "--accuracy", "0.95"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket as scripts/quickstart makes it; the job itself is not run here, only shown on the screen."""
    folder = tmp_path_factory.mktemp("quickstart")
    subprocess.run(
        [ROOT / "scripts" / "quickstart", "--help"],
        env=os.environ | {"QUICKSTART_DIR": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return folder / "bucket" / "digits"


class Training:
    """The script, run by hand with a folder for its checkpoints."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"CLOUDRUN_DATA_DIR": str(data), "CLOUDRUN_CHECKPOINT_DIR": str(folder)}

    def start(self) -> subprocess.Popen[bytes]:
        newest = self.newest()
        resume = {"CLOUDRUN_RESUME_FROM": str(newest) if newest else ""}
        return subprocess.Popen(COMMAND, env=self.env | resume, stdout=subprocess.PIPE)

    def finish(self) -> str:
        output, _ = self.start().communicate()
        return output.decode()

    def newest(self) -> Path | None:
        return max(self.folder.glob("step-*.pt"), key=lambda path: int(path.stem[5:]), default=None)


def weights_in(checkpoint: Path) -> str:
    import torch

    state = torch.load(checkpoint, weights_only=True)["model"]
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()


def test_killed_at_random_moments_it_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    calm, rough = Training(data, tmp_path / "calm"), Training(data, tmp_path / "rough")
    output = calm.finish()
    assert f"step {STEPS}/{STEPS} loss" in output
    moments = random.Random(7)
    for _ in range(3):
        process = rough.start()
        before = rough.newest()
        while rough.newest() == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert rough.newest() not in (None, rough.folder / f"step-{STEPS}.pt"), "the kills must come before the end"
    assert "continuing from" in rough.finish()
    last = f"step-{STEPS}.pt"
    assert weights_in(calm.folder / last) == weights_in(rough.folder / last)
    assert sorted(path.name for path in calm.folder.iterdir()) == ["step-260.pt", "step-280.pt", "step-300.pt"]


def test_missed_accuracy_is_a_failure(data: Path, tmp_path: Path) -> None:
    process = subprocess.run(
        [*COMMAND[:2], "--steps", "1"], env=Training(data, tmp_path).env, capture_output=True, check=False
    )
    assert process.returncode == 1
    assert process.stderr.endswith(b"error: that is less than 0.97\n")


def test_spec_says_how_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("runner.spec")
