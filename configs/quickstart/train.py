"""Train a small network to read handwritten digits. Plain PyTorch: nothing here knows cloudrun.

Killed at any moment and started again, it ends with the same weights, bit for bit, as if nothing had happened. For that
a checkpoint holds all that the next step depends on (weights, optimizer, random state, step), the order of the data
follows from (seed, epoch) alone, and a file gets its final name only when it is complete.

cloudrun sets the variables below; without them the script runs on its own:

    CLOUDRUN_DATA_DIR         where digits.csv.gz lies                  default: .
    CLOUDRUN_CHECKPOINT_DIR   where to save checkpoints                 default: checkpoints
    CLOUDRUN_RESUME_FROM      the checkpoint to continue from           default: none, start anew
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

SEED = 1
BATCH = 64
HELD_OUT = 360  # digits that are only looked at to measure accuracy
KEEP = 3  # local checkpoints


def load_digits(folder: Path) -> tuple[Tensor, Tensor]:
    """1797 images of 8 x 8 pixels between 0 and 1, and the digit that each one shows."""
    table = torch.from_numpy(np.loadtxt(folder / "digits.csv.gz", delimiter=",", dtype=np.float32))
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(SEED))
    table = table[order]
    return table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long()


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def batches(count: int, from_step: int) -> Iterator[Tensor]:
    """Indices of each batch, for ever. The order of an epoch follows from its number, so any step can be the first."""
    per_epoch = count // BATCH
    step = from_step
    while True:
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * SEED + epoch))
        for start in range(position * BATCH, per_epoch * BATCH, BATCH):
            yield order[start : start + BATCH]
            step += 1


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),  # dropout depends on it
    }
    part = folder / f"step-{step}.pt.tmp"
    torch.save(state, part)
    part.replace(folder / f"step-{step}.pt")
    for old in saved_up_to(step, folder)[:-KEEP]:
        old.unlink()


def saved_up_to(step: int, folder: Path) -> list[Path]:
    """Checkpoints, oldest first; without those of an earlier life that had come further than this one."""
    steps = {int(path.stem.removeprefix("step-")): path for path in folder.glob("step-*.pt")}
    return [steps[number] for number in sorted(steps) if number <= step]


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Continue from a checkpoint; returns its step."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def measure(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """The share of digits that are read correctly."""
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == digits).float().mean()
    model.train()
    return float(right)


def train(steps: int, save_every: int, data: Path, checkpoints: Path, resume_from: str) -> float:
    """Train up to step ``steps``; returns the accuracy on the held-out digits."""
    torch.manual_seed(SEED)
    images, digits = load_digits(data)
    seen, held_out = slice(HELD_OUT, None), slice(HELD_OUT)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = 0
    if resume_from:
        start = load(resume_from, model, optimizer)
        print(f"continuing from {resume_from}, after step {start}")

    for step, batch in enumerate(batches(len(digits) - HELD_OUT, start), start + 1):
        if step > steps:
            break
        loss = nn.functional.cross_entropy(model(images[seen][batch]), digits[seen][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps:
            accuracy = measure(model, images[held_out], digits[held_out])
            print(f"step {step}/{steps} loss {loss.item():.4f} accuracy {accuracy:.4f}", flush=True)
        if step % save_every == 0 or step == steps:
            save(checkpoints, step, model, optimizer)
    return measure(model, images[held_out], digits[held_out])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits.")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--accuracy", type=float, default=0.97, help="fail when the held-out digits are read worse")
    options = parser.parse_args()

    # One thread: the order in which many threads add numbers up would be part of the result.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    checkpoints = Path(os.environ.get("CLOUDRUN_CHECKPOINT_DIR", "checkpoints"))
    checkpoints.mkdir(parents=True, exist_ok=True)
    accuracy = train(
        options.steps,
        options.save_every,
        Path(os.environ.get("CLOUDRUN_DATA_DIR", ".")),
        checkpoints,
        os.environ.get("CLOUDRUN_RESUME_FROM", ""),
    )
    print(f"accuracy on {HELD_OUT} digits that were never trained on: {accuracy:.4f}")
    if accuracy < options.accuracy:
        sys.exit(f"error: that is less than {options.accuracy}")


if __name__ == "__main__":
    main()
