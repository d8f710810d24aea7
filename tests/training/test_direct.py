"""A direct save is there whole or not at all, whatever kills it; one that cannot be written does not end training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runner.checkpoint.formats import judge
from runner.training import Checkpointer, DamagedCheckpoint
from runner.training.folder import check, saved_in

SAVES_FOR_EVER = """
import sys, torch
from runner.training import Checkpointer
state = {"weights": torch.nn.Linear(300, 300)}
checkpointer = Checkpointer(state, folder=sys.argv[1], every=1)
checkpointer.restore()
while True:
    checkpointer.step()
"""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _trained(folder: Path, steps: int, keep: int = 3) -> Checkpointer:
    checkpointer = Checkpointer({"model": torch.nn.Linear(2, 2)}, folder=folder, every=1, keep=keep)
    for _ in range(steps):
        checkpointer.step(loss=0.5)
    return checkpointer


def test_what_lies_on_the_disk(tmp_path: Path) -> None:
    _trained(tmp_path, 1)
    assert _names(tmp_path) == ["step-000000000001"]
    folder = tmp_path / "step-000000000001"
    assert _names(folder) == ["state.json", "state.safetensors"]
    meta = json.loads((folder / "state.json").read_bytes())
    assert (meta["format"], meta["version"], meta["step"], meta["world"]) == ("cloudrun-training", 1, 1, 1)
    assert meta["metrics"] == {"loss": 0.5}
    assert meta["files"] == {"state.safetensors": (folder / "state.safetensors").stat().st_size}
    assert judge(folder).complete


def test_the_newest_are_kept(tmp_path: Path) -> None:
    _trained(tmp_path, 5, keep=2)
    assert _names(tmp_path) == ["step-000000000004", "step-000000000005"]


def test_what_an_earlier_life_saved_further_on_stays_until_its_step_comes(tmp_path: Path) -> None:
    _trained(tmp_path, 3)
    os.truncate(tmp_path / "step-000000000003/state.safetensors", 10)
    os.truncate(tmp_path / "step-000000000002/state.safetensors", 10)
    checkpointer = Checkpointer({"model": torch.nn.Linear(2, 2)}, folder=tmp_path, every=1)
    assert checkpointer.restore() == 1
    checkpointer.step()
    with pytest.raises(DamagedCheckpoint):
        check(tmp_path / "step-000000000003")
    checkpointer.step()
    assert [check(path)["step"] for path in saved_in(tmp_path)] == [1, 2, 3]


def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    for number in range(2):
        process = subprocess.Popen([sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)])
        before = saved_in(tmp_path)
        while saved_in(tmp_path) == before:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(0.007 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        saved = saved_in(tmp_path)
        assert saved
        for path in saved:
            check(path)
            assert judge(path).complete
        assert len([name for name in _names(tmp_path) if name.startswith(".")]) <= 2


def test_a_full_disk_is_said_and_the_training_goes_on(
    mount: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = mount("size=1m")
    model = torch.nn.Linear(300, 300)
    checkpointer = Checkpointer({"model": model}, folder=folder, every=1)
    checkpointer.step()
    filler = folder / "filler"
    filler.write_bytes(bytes(500_000))
    checkpointer.step()
    assert "step 2 could not be saved, training goes on: [Errno 28] No space left on device" in capfd.readouterr().err
    assert _names(folder) == ["filler", "step-000000000001"]
    filler.unlink()
    checkpointer.step()
    assert check(folder / "step-000000000003")["step"] == 3
