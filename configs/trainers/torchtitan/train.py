"""A loop with torchtitan's own checkpoint manager, saving in the background: it knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torchtitan.components.checkpoint import CheckpointManager

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="outputs/checkpoint")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one batch takes")


class Optimizer:
    """The optimizer's state under the names of the parameters, as distributed checkpoints keep it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Progress:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def main() -> None:
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=options.steps)
    progress = Progress()
    saved = CheckpointManager(
        CheckpointManager.Config(
            enable=True, folder=options.folder, interval=options.save_steps, keep_latest_k=3, async_mode="async"
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=Optimizer(model, optimizer),
        lr_schedulers=scheduler,
        states={"train_state": progress},
        sd_adapter=None,
    )
    saved.load()
    while progress.step < options.steps:
        time.sleep(options.delay)
        points = torch.randn(8, 2, generator=torch.Generator().manual_seed(progress.step))
        loss = nn.functional.cross_entropy(model(points), (points.prod(1) > 0).long())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        print(f"step {progress.step}/{options.steps}", flush=True)
        saved.save(progress.step, last_step=progress.step == options.steps)
        saved.maybe_wait_for_staging()
    saved.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
