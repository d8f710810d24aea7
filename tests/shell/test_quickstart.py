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

from runner.spec import SpecInvalid, load_spec

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "configs" / "quickstart.yaml"
STEPS = 300
COMMAND = [
    *(sys.executable, str(ROOT / "configs" / "quickstart" / "train.py")),
    *("--steps", str(STEPS), "--save-every", "20"),
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

    def start(self, accuracy: str = "0.95") -> subprocess.Popen[str]:
        newest = self.newest()
        resume = {"CLOUDRUN_RESUME_FROM": str(newest) if newest else ""}
        return subprocess.Popen(
            [*COMMAND, "--accuracy", accuracy],
            env=self.env | resume,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, accuracy: str = "0.95") -> tuple[int, str]:
        process = self.start(accuracy)
        output, _ = process.communicate()
        return process.returncode, output

    def newest(self) -> Path | None:
        return max(self.folder.glob("step-*.pt"), key=lambda path: int(path.stem[5:]), default=None)


def weights_in(checkpoint: Path) -> str:
    import torch

    state = torch.load(checkpoint, weights_only=True)["model"]
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.timeout(300)  # four times torch is loaded, which takes long on a busy machine
def test_killed_at_random_moments_it_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    calm, rough = Training(data, tmp_path / "calm"), Training(data, tmp_path / "rough")
    code, output = calm.finish(accuracy="1.01")
    assert f"step {STEPS}/{STEPS} loss" in output
    assert (code, output.splitlines()[-1]) == (1, "error: that is less than 1.01")
    moments = random.Random(7)
    for _ in range(2):
        process = rough.start()
        before = rough.newest()
        while rough.newest() == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert rough.newest() not in (None, rough.folder / f"step-{STEPS}.pt"), "the kills must come before the end"
    code, output = rough.finish()
    assert code == 0
    assert output.startswith("continuing from")
    last = f"step-{STEPS}.pt"
    assert weights_in(calm.folder / last) == weights_in(rough.folder / last)
    assert sorted(path.name for path in calm.folder.iterdir()) == ["step-260.pt", "step-280.pt", "step-300.pt"]


def test_spec_is_valid_and_asks_for_the_script_that_makes_the_bucket() -> None:
    spec = load_spec(SPEC, environ={"QUICKSTART_BUCKET": "/bucket", "QUICKSTART_STORE": "/store"})
    assert (spec.name, spec.data[0].source, spec.store) == ("quickstart", "file:///bucket/digits", "file:///store")
    with pytest.raises(SpecInvalid, match="run scripts/quickstart"):
        load_spec(SPEC, environ={})
