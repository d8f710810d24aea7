"""Small trainings that are run in processes of their own, and killed there.

Each writes, step by step, which data it saw, and at its end a digest of all it came to. A training that was killed and
resumed must have seen the same data and come to the same end as one that was left alone.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._dynamo  # these two are slow to import: once here, before there are lives
import torch.distributed.checkpoint
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from runner.training import Checkpointer, ResumableSampler, SeededDataset, state_digest
from tests.training.killing import Life

SAVE_EVERY = 3


def live(life: Life) -> None:
    """Run one training, from wherever it can go on, to its end."""
    # As in a process that was started by hand: loader workers are forked, and die with it.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    np.random.seed(6)  # noqa: NPY002 (the global generator is what is tested)
    random.seed(7)
    life.folder.mkdir(parents=True, exist_ok=True)
    if life.kind in _DISTRIBUTED:
        store = life.folder / f"meeting-{life.attempt}"
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=life.rank, world_size=life.world)
    _KINDS[life.kind](life)
    if life.kind in _DISTRIBUTED:
        distributed.destroy_process_group()


# ---- the trainings


def _note(life: Life, step: int, *data: Tensor) -> None:
    """Appended with one write: a kill cannot cut a line."""
    digest = hashlib.blake2b(b"".join(item.numpy().tobytes() for item in data), digest_size=8).hexdigest()
    descriptor = os.open(life.seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{step} {digest}\n".encode())
    os.close(descriptor)


def _conclude(life: Life, **state: Any) -> None:
    drawn = [float(torch.rand(())), _numpy_draw(), random.random()]
    life.end.write_text(state_digest({**state, "drawn": drawn}, full=True))


def _numpy_draw() -> float:
    return float(np.random.rand())  # noqa: NPY002 (the global generator is what is tested)


def _points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator))


def _perceptron(life: Life) -> None:
    """All that can have a state: dropout, scheduler, scaler, average, generators, plain values, all three RNGs."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=life.total)
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    averaging: Any = torch.optim.swa_utils.get_ema_multi_avg_fn
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging(0.9))
    order, noise = torch.Generator().manual_seed(2), torch.Generator().manual_seed(3)
    loader: Any = StatefulDataLoader(_points(50), batch_size=4, shuffle=True, num_workers=life.workers, generator=order)
    best = {"loss": float("inf"), "at": np.float64(0)}
    state = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler,
        "average": average, "loader": loader, "noise": noise, "best": best,
    }  # fmt: skip
    checkpointer = Checkpointer(state, folder=life.folder, every=SAVE_EVERY, total=life.total, digest="full")
    start = checkpointer.restore()
    for step, (x, y) in zip(range(start, life.total), checkpointer.endless(loader), strict=False):
        blurred = x + 0.1 * torch.randn(x.shape, generator=noise) + 0.1 * random.random() * _numpy_draw()
        _note(life, step, blurred, y)
        loss = cross_entropy(model(blurred), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        if loss.item() < best["loss"]:
            best.update(loss=loss.item(), at=np.float64(step))
        checkpointer.step(loss=loss)
    ends = {name: thing.state_dict() for name, thing in state.items() if name not in ("loader", "noise", "best")}
    _conclude(life, **ends, best=best, noise=noise.get_state())


class Pictures(Dataset[tuple[Tensor, int]]):
    """Small random pictures, each shifted, flipped and lit at random when it is asked for."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        picture = picture.roll(random.randrange(3), 2) * (0.5 + _numpy_draw())
        return (picture.flip(2) if torch.rand(()) < 0.5 else picture) + 0.1 * torch.randn(picture.shape), index % 3


def _pictures(life: Life) -> None:
    """Augmentation in the workers, seeded per sample; the place found by our sampler."""
    data: SeededDataset[tuple[Tensor, int]] = SeededDataset(Pictures(), seed=8)
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=ResumableSampler(data, seed=9),
        num_workers=life.workers,
        persistent_workers=life.workers == 4,
    )
    _classify(life, loader)


def _replayed(life: Life) -> None:
    """A plain loader, with augmentation from the global generators of its workers: the epoch is read again."""
    _classify(life, DataLoader(Pictures(), batch_size=4, shuffle=True, num_workers=life.workers))


def _classify(life: Life, loader: DataLoader[Any]) -> None:
    """Goes by epochs, with something to do at the end of each."""
    body = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2))
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    checkpointer = Checkpointer(state, folder=life.folder, every=SAVE_EVERY, total=life.total)
    step = checkpointer.restore()
    while step < life.total:
        for x, y in checkpointer.batches(loader):
            _note(life, step, x, y)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            checkpointer.step(loss=loss)
            if step == life.total:
                break
        else:
            scheduler.step()
    _conclude(life, model=model.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict())


class Words(nn.Module):
    """A transformer over twelve words, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.2, batch_first=True)
        self.embed = nn.Embedding(12, 16)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decode = nn.Linear(16, 12, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        decoded: Tensor = self.decode(self.encode(self.embed(words)))
        return decoded


def _transformer(life: Life) -> None:
    """Dropout, bf16 autocast, two batches to an optimizer step."""
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.randint(12, (60, 7), generator=torch.Generator().manual_seed(4))
    loader = DataLoader(TensorDataset(words), batch_size=4, sampler=ResumableSampler(range(60)))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpointer = Checkpointer(state, folder=life.folder, every=SAVE_EVERY, total=life.total, digest="sampled")
    start = checkpointer.restore()
    batches = checkpointer.endless(loader)
    for step in range(start, life.total):
        optimizer.zero_grad()
        for _ in range(2):
            (text,) = next(batches)
            _note(life, step, text)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        checkpointer.step(loss=loss)
    _conclude(life, model=model.state_dict(), optimizer=optimizer.state_dict())


def _data_parallel(life: Life) -> None:
    """DDP: the weights are the same everywhere, data and dropout are each rank's own."""
    torch.manual_seed(5 + life.rank)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data := _points(50), batch_size=4, sampler=ResumableSampler(data))
    _together(life, model, optimizer, loader)


def _fully_sharded(life: Life) -> None:
    """FSDP2: each rank holds its part of weights and optimizer."""
    model, optimizer = _sharded_model(life)
    loader = DataLoader(data := _points(50), batch_size=4, sampler=ResumableSampler(data))
    _together(life, model, optimizer, loader)


def _sharded_model(life: Life) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (life.world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _sharded_look(life: Life) -> None:
    """Restores what another number of ranks may have saved, and tells what the whole of it is."""
    model, optimizer = _sharded_model(life)
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer}, folder=life.folder)
    step = checkpointer.restore()
    whole = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    life.end.write_text(state_digest({"step": step, **_gathered(whole)}, full=True))


def _gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _gathered(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _stopped(life: Life) -> None:
    """Ranks of which only the last is asked to stop, while each waits for the others in every step."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    checkpointer = Checkpointer({"model": model}, folder=life.folder, stop_signals=[signal.SIGUSR1])
    step = checkpointer.restore()
    while not checkpointer.stopping:
        model(torch.ones(2, 6)).sum().backward()
        step += 1
        _note(life, step, torch.ones(1))
        checkpointer.step()
    life.end.write_text(str(step))


def _together(life: Life, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpointer = Checkpointer(state, folder=life.folder, every=SAVE_EVERY, total=life.total)
    start = checkpointer.restore()
    for step, (x, y) in zip(range(start, life.total), checkpointer.endless(loader), strict=False):
        _note(life, step, x, y)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        checkpointer.step(loss=loss)
    _conclude(life, model=model.state_dict(), optimizer=optimizer.state_dict())


_KINDS: dict[str, Callable[[Life], None]] = {
    "perceptron": _perceptron,
    "pictures": _pictures,
    "replayed": _replayed,
    "transformer": _transformer,
    "data parallel": _data_parallel,
    "fully sharded": _fully_sharded,
    "sharded look": _sharded_look,
    "stopped": _stopped,
}
_DISTRIBUTED = ("data parallel", "fully sharded", "sharded look", "stopped")
