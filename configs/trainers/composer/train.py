"""A tiny classifier with Composer: a script that knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--save_folder", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one sample takes")
parser.add_argument("--load_path")


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of the plane; the class is the sign of x times y."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.delay)
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return point, (point.prod() > 0).long()


class Steps(Callback):
    def batch_end(self, state: Any, _logger: Any) -> None:
        print(f"step {state.timestamp.batch.value}/{state.max_duration.value}", flush=True)


def main() -> None:
    options = parser.parse_args()
    module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    model = ComposerClassifier(module, num_classes=2)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=DataLoader(Points(options.delay), batch_size=2, shuffle=True),
        max_duration=f"{options.steps}ba",
        save_folder=options.save_folder,
        save_interval=f"{options.save_steps}ba",
        save_num_checkpoints_to_keep=3,
        load_path=options.load_path,
        device="gpu" if torch.cuda.is_available() else "cpu",
        seed=0,
        progress_bar=False,
        callbacks=[Steps()],
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
