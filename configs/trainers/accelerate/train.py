"""A training loop of one's own over Accelerate, in the manner of its examples: it knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one sample takes")
parser.add_argument("--resume_from_checkpoint")

BATCHES = 128


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of the plane; the class is the sign of x times y."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.delay)
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return point, (point.prod() > 0).long()


def main() -> None:
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=options.steps)
    loader = DataLoader(Points(options.delay), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    step = 0
    if options.resume_from_checkpoint:
        accelerator.load_state(options.resume_from_checkpoint)
        step = int(Path(options.resume_from_checkpoint).name.removeprefix("step_"))
    while step < options.steps:
        epoch, done = divmod(step, BATCHES)
        loader.set_epoch(epoch)
        for points, classes in accelerator.skip_first_batches(loader, done) if done else loader:
            loss = nn.functional.cross_entropy(model(points), classes)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step}/{options.steps}", flush=True)
            if step % options.save_steps == 0:
                accelerator.save_state(str(Path(options.output_dir) / f"step_{step}"))
            if step == options.steps:
                break


if __name__ == "__main__":
    main()
