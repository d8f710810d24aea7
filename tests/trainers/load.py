"""Open checkpoints with the library that wrote them: load.py TRAINER, paths on standard input.

Prints, as its last line, a JSON object: path -> step. Ends with an error for what does not load.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def transformers(path: Path) -> int:
    import torch
    from transformers import LlamaForCausalLM, TrainerState

    LlamaForCausalLM.from_pretrained(path)
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.load(path / name, weights_only=True)
    torch.load(path / "rng_state.pth", weights_only=False)
    return int(TrainerState.load_from_json(str(path / "trainer_state.json")).global_step)


def lightning(path: Path) -> int:
    import torch

    state = torch.load(path, weights_only=False)
    assert state["state_dict"]
    assert state["optimizer_states"][0]["state"]
    return int(state["global_step"])


def accelerate(path: Path) -> int:
    import torch
    from accelerate import Accelerator
    from torch import nn

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(str(path))
    return int(scheduler.last_epoch)


def torch_save(path: Path) -> int:
    import torch

    state = torch.load(path)
    assert {int(one["step"]) for one in state["optimizer"]["state"].values()} == {state["iter_num"]}
    return int(state["iter_num"])


def torchtitan(path: Path) -> int:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile() as whole:
        dcp_to_torch_save(path, whole.name)
        state = torch.load(whole.name, weights_only=False)
    # torchtitan's last one holds the model alone.
    return int(state["train_state"]["step"]) if "train_state" in state else int(path.name.removeprefix("step-"))


def deepspeed(path: Path) -> int:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    assert get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
    return int(path.name.removeprefix("global_step"))


def composer(path: Path) -> int:
    import torch

    state = torch.load(path, weights_only=False)["state"]
    assert state["model"]
    assert state["optimizers"]
    return int(state["timestamp"]["Timestamp"]["batch"])


def ultralytics(path: Path) -> int:
    from ultralytics import YOLO
    from ultralytics.nn.tasks import torch_safe_load

    YOLO(path)
    state, _ = torch_safe_load(path)
    return int(state["epoch"])


LOADERS: dict[str, Callable[[Path], Any]] = {
    one.__name__: one
    for one in (transformers, lightning, accelerate, torch_save, torchtitan, deepspeed, composer, ultralytics)
}


if __name__ == "__main__":
    load = LOADERS[sys.argv[1]]
    print(json.dumps({line: load(Path(line)) for line in sys.stdin.read().splitlines()}))
