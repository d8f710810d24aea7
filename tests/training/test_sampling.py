"""Order and augmentation follow from numbers alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from runner.training import ResumableSampler, SeededDataset, seed_sample


class Draws(Dataset[tuple[float, float, float]]):
    """Each sample is three random numbers, one from each global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 (the global generator is what is tested)


def _drawn(loader: DataLoader[Any]) -> list[Any]:
    return [[item.tolist() for item in batch] for batch in loader]


def test_a_sample_draws_the_same_whoever_asks_and_when() -> None:
    data = SeededDataset(Draws(), seed=3)
    first = [data[index] for index in range(12)]
    assert [data[index] for index in reversed(range(12))] == first[::-1]
    assert len(set(first)) == 12


def test_asking_for_a_sample_leaves_the_global_generators_alone() -> None:
    seed_sample(1, 2, 3)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 (the global generator is what is tested)
    seed_sample(1, 2, 3)
    SeededDataset(Draws())[5]
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected  # noqa: NPY002 (the global generator is what is tested)


def test_seed_epoch_and_index_each_matter() -> None:
    numbers = {seed_sample(*triple) for triple in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]}
    assert len(numbers) == 5


@pytest.mark.parametrize("persistent", [False, True])
def test_a_new_epoch_reaches_workers_also_persistent_ones(persistent: bool) -> None:
    alone, shared = SeededDataset(Draws()), SeededDataset(Draws())
    here = DataLoader(alone, batch_size=4)
    there = DataLoader(
        shared, batch_size=4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    for epoch in range(3):
        alone.set_epoch(epoch)
        shared.set_epoch(epoch)
        assert _drawn(here) == _drawn(there)


def test_the_order_follows_from_seed_and_epoch() -> None:
    sampler = ResumableSampler(range(20), seed=4)
    first = list(sampler)
    assert sorted(first) == list(range(20))
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ResumableSampler(range(20), seed=5)) != first
    assert list(ResumableSampler(range(20), shuffle=False)) == list(range(20))


def test_skipping_leaves_out_the_first_once() -> None:
    sampler = ResumableSampler(range(20), seed=4)
    whole = list(sampler)
    sampler.skip(7)
    sampler.set_epoch(0)  # as loops do that are used to DistributedSampler
    assert list(sampler) == whole[7:]
    assert list(sampler) == whole
    sampler.skip(7)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 20


def test_ranks_share_an_epoch_evenly() -> None:
    ranks = [list(ResumableSampler(range(11), seed=4, rank=rank, world=3)) for rank in range(3)]
    assert [len(indices) for indices in ranks] == [3, 3, 3]
    assert len({index for indices in ranks for index in indices}) == 9
