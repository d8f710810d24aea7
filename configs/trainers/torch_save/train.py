"""A plain loop with torch.save into one file, written over again and again: it knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one batch takes")


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    saved = options.out / "ckpt.pt"
    model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["iter_num"]
    while step < options.steps:
        time.sleep(options.delay)
        points = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(points), (points.prod(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}/{options.steps}", flush=True)
        if step % options.save_steps == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
            torch.save(state, saved)


if __name__ == "__main__":
    main()
