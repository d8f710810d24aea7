"""For Lightning: ``Trainer(..., callbacks=[CloudrunCallback()])``.

Progress for the supervisor, a checkpoint when it asks for one, and the end of the training when the machine goes. What
Lightning leaves out of its checkpoints is added: the random states of every rank, and the place inside a shuffled epoch
where the data have a :class:`.EpochSampler` (torchdata's StatefulDataLoader Lightning knows itself). Then a resume
is exact, as far as what is random about a sample follows from its index (see :class:`.SeededDataset`).
"""

# ruff: noqa: ARG002 (a hook's arguments are the library's)
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from runner.training import rng
from runner.training.following import Following, Stopwatch
from runner.training.ranks import Ranks
from runner.training.sampling import ResumableSampler
from runner.training.state import pack, unpack
from runner.training.wishes import Urgency

_KEY = "cloudrun"


class CloudrunCallback(Callback):
    """``sampler``, if given, is that of the training data: the Trainer then needs ``use_distributed_sampler=False``.

    Checkpoints that the supervisor asks for go where the script's ModelCheckpoint saves, and the newest one stays.
    """

    def __init__(self, sampler: EpochSampler | None = None) -> None:
        self._sampler = sampler
        self._following: Following | None = None
        self._own = ""
        self._resumed: dict[str, Any] = {}

    # ---- what is wanted

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._following = Following()
        if self._resumed and self._sampler is not None:
            self._sampler.resume(*self._resumed["place"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._following is not None
        total = trainer.max_steps if trainer.max_steps > 0 else None
        urgency = self._following.step(trainer.global_step, total, _loss_of(outputs))
        if urgency > Urgency.NONE:
            self._save(trainer)
        if urgency == Urgency.STOP:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._following is not None:
            self._following.close()

    def _save(self, trainer: Trainer) -> None:
        assert self._following is not None
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or os.environ["CLOUDRUN_CHECKPOINT_DIR"]
        path = os.path.join(folder, f"asked-step={trainer.global_step}.ckpt")
        with Stopwatch() as watch:
            trainer.save_checkpoint(path)
        self._following.saved(path, trainer.global_step, watch.seconds)
        if self._own not in ("", path) and trainer.is_global_zero:
            trainer.strategy.remove_checkpoint(self._own)
        self._own = path

    # ---- what Lightning leaves out

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._following is not None:
            # As tensors and plain values: Lightning loads nothing else of a checkpoint.
            random = pack(rng.capture(), "random")
            mine = {"plan": random.plan, "tensors": random.tensors}
            checkpoint[_KEY] = {"random": _of_all_ranks(mine, self._following.ranks), "place": _place_of(trainer)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumed = checkpoint.get(_KEY, {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loader's iterator, which draws from the random states, has been made: now they can be put back."""
        resumed, self._resumed = self._resumed, {}
        assert self._following is not None
        if len(resumed.get("random", ())) != self._following.ranks.world:
            return
        mine = resumed["random"][self._following.ranks.rank]
        rng.restore(unpack(mine["plan"], mine["tensors"]))
        if resumed["place"][1] == 0 and _draws_each_epoch(trainer.train_dataloader):
            # At an epoch's end the next one's iterator was not made yet: it would have drawn from these states.
            torch.empty((), dtype=torch.int64).random_()


class EpochSampler(ResumableSampler):
    """Indices of a shuffled epoch, for a Trainer that asks for them early or late, and tells the epoch again."""

    _place: tuple[int, int] | None = None

    def resume(self, epoch: int, first: int) -> None:
        """The iteration of ``epoch`` that comes next begins at the index number ``first`` of this rank."""
        self.set_epoch(epoch)
        self._place = (epoch, first)

    def __iter__(self) -> Iterator[int]:
        place, self._place = self._place, None
        if place is not None and place[0] == self.epoch:
            self.skip(place[1])
        return super().__iter__()


def _place_of(trainer: Trainer) -> tuple[int, int]:
    """The epoch from 0, and how many samples of it this rank has had."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    size = getattr(trainer.train_dataloader, "batch_size", None) or 1
    return (epochs.ready, 0) if batches.is_last_batch else (epochs.ready - 1, batches.current.ready * size)


def _draws_each_epoch(loader: Any) -> bool:
    """True for a DataLoader that takes a base seed from the global generator for every epoch."""
    return isinstance(loader, DataLoader) and loader.generator is None and not loader.persistent_workers


def _loss_of(outputs: Any) -> float | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return float(loss.detach()) if isinstance(loss, Tensor) else None


def _of_all_ranks(mine: dict[str, Any], ranks: Ranks) -> list[Any]:
    """What each rank gives, in their order. Every rank must call it."""
    if ranks.world == 1:
        return [mine]
    found: list[Any] = [None] * ranks.world
    distributed.all_gather_object(found, mine, group=ranks.group)
    return found
