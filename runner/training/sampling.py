"""Data whose order and random augmentation follow from numbers, so that any sample can be the next one.

Random states inside loader workers cannot be saved: they live in other processes, ahead of the training. So nothing is
saved: what is random about a sample is drawn from (seed, epoch, index), and an epoch's order from (seed, epoch). The
same numbers come out with any count of workers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sized
from typing import Generic, TypeVar

import torch
from torch import distributed
from torch.utils.data import Dataset, Sampler

from runner.training import rng
from runner.training.optional import np

Sample = TypeVar("Sample", covariant=True)  # noqa: PLC0105 (the word that reads well in Dataset[Sample])


def mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers; neighbours give unrelated seeds."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_sample(seed: int, epoch: int, index: int) -> int:
    """Seed Python's, numpy's and torch's CPU generators for one sample; returns the seed, for generators of your own.

    For use inside a dataset's ``__getitem__``, in workers. It changes the global states: :class:`SeededDataset` also
    puts them back.
    """
    number = mixed(seed, epoch, index)
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if np is not None:
        np.random.seed(number & 0xFFFFFFFF)
    return number


class SeededDataset(Dataset[Sample], Generic[Sample]):
    """A map-style dataset whose samples draw the same random numbers whoever asks for them, and whenever.

    Around each ``dataset[index]`` the global generators are seeded by :func:`seed_sample` and then put back as they
    were. The epoch lies in shared memory, so that :meth:`set_epoch` reaches persistent workers too.
    """

    def __init__(self, dataset: Dataset[Sample], seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        before = rng.capture_host()
        try:
            seed_sample(self.seed, int(self._epoch), index)
            return self.dataset[index]
        finally:
            rng.restore_host(before)

    def set_epoch(self, epoch: int) -> None:
        """From now on samples are those of ``epoch``. ``Checkpointer.batches`` calls it."""
        self._epoch.fill_(epoch)
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]


class ResumableSampler(Sampler[int]):
    """Indices of one rank in one epoch; can start anywhere without reading what lies before.

    The order follows from (seed, epoch). Every rank gets equally many: up to ``world - 1`` indices at an epoch's end
    are left out. ``rank`` and ``world`` come from torch.distributed where they are not given.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        joined = distributed.is_available() and distributed.is_initialized()
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank if rank is not None else distributed.get_rank() if joined else 0
        self.world = world if world is not None else distributed.get_world_size() if joined else 1
        self.epoch = 0
        self._size = len(dataset)
        self._skip = 0

    def __len__(self) -> int:
        return self._size // self.world

    def __iter__(self) -> Iterator[int]:
        first, self._skip = self._skip, 0
        last = len(self) * self.world
        return iter(self._order()[first * self.world + self.rank : last : self.world])

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``. Saying the same epoch again changes nothing."""
        if epoch != self.epoch:
            self.epoch, self._skip = epoch, 0

    def skip(self, count: int) -> None:
        """The next iteration, and only that, leaves out the first ``count`` indices of this rank."""
        self._skip = count

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        return [*torch.randperm(self._size, generator=generator).tolist()]
