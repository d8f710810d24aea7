"""A loop over DeepSpeed with ZeRO 1: a script that knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--save_dir", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one batch takes")

SETTINGS = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    options = parser.parse_args()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
    path, _ = engine.load_checkpoint(options.save_dir)
    step = engine.global_steps if path else 0
    while step < options.steps:
        time.sleep(options.delay)
        points = torch.randn(8, 2, generator=torch.Generator().manual_seed(step)).to(engine.device)
        loss = nn.functional.cross_entropy(engine(points), (points.prod(1) > 0).long())
        engine.backward(loss)
        engine.step()
        step += 1
        print(f"step {step}/{options.steps}", flush=True)
        if step % options.save_steps == 0:
            engine.save_checkpoint(options.save_dir)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
