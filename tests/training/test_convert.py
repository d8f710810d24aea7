"""One file for plain torch.load."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from runner.training import Checkpointer


def test_a_checkpoint_becomes_a_file_that_torch_loads(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    values = {"best": np.float64(0.5), "table": np.arange(3), "milestones": Counter({2: 1}), 3: (1, {2})}
    state = {"model": model, "optimizer": optimizer, "values": values}
    checkpointer = Checkpointer(state, folder=tmp_path, every=1)
    checkpointer.step(loss=0.25)
    target = tmp_path / "model.pt"
    command = [sys.executable, "-m", "runner.training.convert", str(tmp_path / "step-000000000001"), str(target)]
    subprocess.run(command, check=True)

    loaded = torch.load(target, weights_only=True)
    assert (loaded["step"], loaded["metrics"]) == (1, {"loss": 0.25})
    assert type(loaded["state"]["model"]) is OrderedDict
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    other.load_state_dict(loaded["state"]["model"])
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    torch.optim.AdamW(other.parameters()).load_state_dict(loaded["state"]["optimizer"])
    plain = loaded["state"]["values"]
    assert plain["table"].tolist() == [0, 1, 2]
    assert {**plain, "table": None} == {"best": 0.5, "table": None, "milestones": {2: 1}, 3: (1, {2})}
    assert type(plain["best"]) is float


def test_a_folder_that_is_none_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner.training.convert", str(tmp_path), str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} has no state.json")
    assert "\nhint: " in done.stderr
    assert not (tmp_path / "model.pt").exists()
