"""A tiny classifier with Lightning: a script that knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--dirpath", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one sample takes")
parser.add_argument("--ckpt_path")


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


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        points, classes = batch
        return nn.functional.cross_entropy(self.layers(points), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Steps(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        print(f"step {trainer.global_step}/{trainer.max_steps}", flush=True)


def main() -> None:
    options = parser.parse_args()
    pl.seed_everything(0)
    saves = ModelCheckpoint(options.dirpath, every_n_train_steps=options.save_steps, save_top_k=-1, save_last=True)
    trainer = pl.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[saves, Steps()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Points(options.delay), batch_size=2, shuffle=True)
    trainer.fit(Classifier(), loader, ckpt_path=options.ckpt_path)


if __name__ == "__main__":
    main()
