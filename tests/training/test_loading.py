"""A loader comes back to its place, wherever in an epoch that was, with the random states as they were."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from runner.training import Checkpointer, ResumableSampler, SeededDataset

DATA = TensorDataset(torch.arange(11))  # 4 batches of 3, the last of 2


class Stream(IterableDataset[int]):
    """Eleven numbers in an order that is drawn anew in each epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(11).tolist()


Make = Callable[[], DataLoader[Any]]
LOADERS: dict[str, Make] = {
    "stateful": lambda: StatefulDataLoader(DATA, batch_size=3, shuffle=True),
    "stateful, workers": lambda: StatefulDataLoader(DATA, batch_size=3, shuffle=True, num_workers=2),
    "stateful, generator": lambda: StatefulDataLoader(
        DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "stateful, persistent": lambda: StatefulDataLoader(
        DATA, batch_size=3, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "stateful, our sampler": lambda: StatefulDataLoader(DATA, batch_size=3, sampler=ResumableSampler(DATA)),
    "skipping": lambda: DataLoader(DATA, batch_size=3, sampler=ResumableSampler(DATA)),
    "skipping, persistent": lambda: DataLoader(
        DATA, batch_size=3, sampler=ResumableSampler(DATA), num_workers=2, persistent_workers=True
    ),
    "replaying": lambda: DataLoader(DATA, batch_size=3, shuffle=True),
    "replaying, workers": lambda: DataLoader(DATA, batch_size=3, shuffle=True, num_workers=2),
    "replaying, persistent": lambda: DataLoader(
        DATA, batch_size=3, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "replaying, generator": lambda: DataLoader(
        DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "replaying, distributed": lambda: DataLoader(
        DATA, batch_size=3, sampler=DistributedSampler(DATA, num_replicas=1, rank=0)
    ),
    "replaying, drawn with replacement": lambda: DataLoader(
        DATA, batch_size=3, sampler=torch.utils.data.RandomSampler(DATA, replacement=True, num_samples=11)
    ),
    "replaying, stream": lambda: DataLoader(Stream(), batch_size=3),
}


def _seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 (the global generator is what is tested)
    random.seed(1)


def _drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002 (the global generator is what is tested)


def _train(make: Make, folder: Path, steps: int) -> list[Any]:
    """What each step saw and drew, from where the folder's checkpoint was."""
    _seeded()
    loader = make()
    checkpointer = Checkpointer({"loader": loader}, folder=folder, every=1)
    start = checkpointer.restore()
    seen = []
    for _, batch in zip(range(start, steps), checkpointer.endless(loader), strict=False):
        seen.append((torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist(), _drawn()))
        checkpointer.step()
    return seen


@pytest.mark.parametrize("name", LOADERS)
def test_every_step_can_be_the_last_of_a_life(tmp_path: Path, name: str) -> None:
    """With 4 batches to an epoch that is before, at and after the end of one."""
    undisturbed = _train(LOADERS[name], tmp_path / "undisturbed", 10)
    assert len(undisturbed) == 10
    lives = [_train(LOADERS[name], tmp_path / "lives", steps) for steps in (3, 4, 5, 10)]
    assert list(itertools.chain(*lives)) == undisturbed


@pytest.mark.parametrize("name", LOADERS)
def test_a_save_between_two_epochs(tmp_path: Path, name: str) -> None:
    def epochs(folder: Path, first: int, last: int) -> list[Any]:
        _seeded()
        loader = LOADERS[name]()
        checkpointer = Checkpointer({"loader": loader}, folder=folder, every=1000)
        checkpointer.restore()
        assert checkpointer.epoch(loader) == first
        seen = []
        for batch in itertools.chain(*(checkpointer.batches(loader) for _ in range(first, last))):
            seen.append((torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist(), _drawn()))
            checkpointer.step()
        assert checkpointer.save()
        return seen

    undisturbed = epochs(tmp_path / "undisturbed", 0, 3)
    folder = tmp_path / "lives"
    assert epochs(folder, 0, 1) + epochs(folder, 1, 3) == undisturbed


def test_a_stateful_loader_needs_no_batches(tmp_path: Path) -> None:
    """Its own loop is exact as well: restore makes its iterator before it puts the random states back."""

    def train(folder: Path, steps: int) -> list[Any]:
        _seeded()
        loader: Any = StatefulDataLoader(DATA, batch_size=3, shuffle=True)
        checkpointer = Checkpointer({"loader": loader}, folder=folder, every=1)
        step = checkpointer.restore()
        seen = []
        while step < steps:
            for batch in loader:
                seen.append((batch[0].tolist(), _drawn()))
                checkpointer.step()
                step += 1
                if step == steps:
                    break
        return seen

    undisturbed = train(tmp_path / "undisturbed", 10)
    lives = [train(tmp_path / "lives", steps) for steps in (1, 3, 4, 5, 8, 10)]
    assert list(itertools.chain(*lives)) == undisturbed


def test_an_epoch_that_is_left_early_is_over(tmp_path: Path) -> None:
    loader = DataLoader(DATA, batch_size=3, sampler=ResumableSampler(DATA))
    checkpointer = Checkpointer({"loader": loader}, folder=tmp_path)
    first = next(checkpointer.batches(loader))
    assert checkpointer.epoch(loader) == 0
    second = next(checkpointer.batches(loader))
    assert checkpointer.epoch(loader) == 1
    assert first[0].tolist() != second[0].tolist()


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    def begin(batch: int) -> tuple[Checkpointer, DataLoader[Any]]:
        loader = DataLoader(DATA, batch_size=batch, sampler=ResumableSampler(DATA))
        checkpointer = Checkpointer({"loader": loader}, folder=tmp_path)
        checkpointer.restore()
        return checkpointer, loader

    checkpointer, loader = begin(3)
    batches = checkpointer.batches(loader)
    used = [next(batches)[0].tolist() for _ in range(2)]
    checkpointer.step()
    checkpointer.save()
    checkpointer, loader = begin(2)
    rest = [batch[0].tolist() for batch in checkpointer.batches(loader)]
    assert [len(batch) for batch in rest] == [2, 2, 1]
    assert sorted(itertools.chain(*used, *rest)) == list(range(11))


class TellsEpoch(Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _said(capfd: pytest.CaptureFixture[str], loader: DataLoader[Any], folder: Path) -> str:
    """What is said when a training with this loader is made, and resumed after two batches."""
    for _ in range(2):
        checkpointer = Checkpointer({"loader": loader}, folder=folder)
        checkpointer.restore()
        next(checkpointer.endless(loader))
        checkpointer.step()
        checkpointer.save()
    return capfd.readouterr().err


def test_what_spoils_exactness_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    persistent = DataLoader(TellsEpoch(), batch_size=3, num_workers=1, persistent_workers=True)
    said = _said(capfd, persistent, tmp_path / "a")
    assert "set_epoch never reaches persistent workers" in said
    assert "1 batches were read again" in said
    loader = DataLoader(DATA, batch_size=3, sampler=ResumableSampler(DATA), num_workers=1)
    assert "exact unless samples draw from global generators" in _said(capfd, loader, tmp_path / "b")


def test_nothing_is_said_where_all_is_exact(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seeded = SeededDataset(DATA)
    loader = DataLoader(seeded, batch_size=3, sampler=ResumableSampler(seeded), num_workers=1, persistent_workers=True)
    assert _said(capfd, loader, tmp_path) == ""


def test_a_loader_that_is_not_part_of_the_state_is_refused(tmp_path: Path) -> None:
    checkpointer = Checkpointer({}, folder=tmp_path)
    with pytest.raises(ValueError, match="not part of the Checkpointer's state"):
        checkpointer.batches(DataLoader(DATA))


def test_a_loader_without_batches_does_not_run_for_ever(tmp_path: Path) -> None:
    loader = DataLoader(DATA, batch_size=20, drop_last=True)
    checkpointer = Checkpointer({"loader": loader}, folder=tmp_path)
    with pytest.raises(ValueError, match="no batches"):
        next(checkpointer.endless(loader))


def test_a_plain_loader_that_was_read_past_us_is_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(DATA, batch_size=3, shuffle=True)
    checkpointer = Checkpointer({"loader": loader}, folder=tmp_path)
    for _ in loader:
        checkpointer.step()
    checkpointer.save()
    checkpointer.step()
    checkpointer.save()
    assert capfd.readouterr().err.count("not read through checkpointer.batches") == 1
