"""Where a data loader stands, and how it comes back there.

Three ways, the first that fits:

stateful   the loader has a ``state_dict`` (torchdata's StatefulDataLoader): it knows itself
skipping   its sampler is our :class:`.ResumableSampler`: the next epoch's iterator begins further on
replaying  anything else: the random states of the epoch's start are put back, and the batches that were used are read
           again and dropped. Exact, and slow when an epoch is long
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from runner.training import rng
from runner.training.sampling import ResumableSampler, SeededDataset

Way = Literal["stateful", "skipping", "replaying"]


class TrackedLoader:
    """A data loader with its epoch (from 0) and the number of batches used of it."""

    own = True

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        self.name = name
        self.loader = loader
        self.way = _way_of(loader)
        self.epoch = 0
        self.batch = 0
        self.was_read = False
        self._samples = 0
        self._resumed: Callable[[], Iterator[Any]] | None = None
        self._start: dict[str, Any] | None = None

    def batches(self) -> Iterator[Any]:
        """What is left of this epoch. A new call after an epoch that was left early begins the next one."""
        begin, self._resumed = self._resumed or self._begin, None
        for batch in begin():
            self.was_read = True
            self.batch += 1
            self._samples += self.loader.batch_size or 0
            yield batch
        self._next_epoch()

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` needs. Draws from the random generators when the loader was not touched yet."""
        state: dict[str, Any] = {"way": self.way, "epoch": self.epoch, "batch": self.batch, "length": self._length()}
        if self.way == "stateful":
            state["inside"] = self.loader.state_dict()  # type: ignore[attr-defined]
        if self.way == "skipping":
            state["samples"] = self._samples * self._sampler().world
        if self.way == "replaying" and self.batch:
            state["start"] = self._start
        return state

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Bring the loader to where ``state`` was taken, with its iterator made. Random states must be put back after.

        Returns in words what makes the position doubtful.
        """
        self.epoch = state["epoch"]
        self._set_epoch()
        if state["way"] != self.way:
            return [
                f"{self.name}: its place was kept by {state['way']}, now by {self.way}: epoch {self.epoch} begins anew"
            ]
        self.batch = state["batch"]
        if self.way == "stateful":
            self._load(state["inside"])
        elif self.batch:
            iterator = self._skipped(state) if self.way == "skipping" else self._replayed(state["start"])
            self._resumed = lambda: iterator
        elif self.epoch and _persistent(self.loader):
            # The run that was not disturbed has live workers here, and draws no base seed for new ones.
            iter(self.loader)
        return self._what_changed(state) + self._doubts()

    def generators(self) -> dict[str, torch.Generator]:
        """Generators that the loader draws from, beside the global ones."""
        sampler = getattr(self.loader, "sampler", None)
        found = {"loader": self.loader.generator, "sampler": getattr(sampler, "generator", None)}
        return {name: item for name, item in found.items() if isinstance(item, torch.Generator)}

    def warnings(self) -> list[str]:
        """What can be known before the first batch to spoil an exact resume."""
        dataset = self.loader.dataset
        if _persistent(self.loader) and not isinstance(dataset, SeededDataset) and hasattr(dataset, "set_epoch"):
            return [
                f"{self.name}: set_epoch never reaches persistent workers, but does after a resume; use SeededDataset"
            ]
        return []

    def _begin(self) -> Iterator[Any]:
        if self.batch:
            self._next_epoch()
        self._set_epoch()
        if self.way == "replaying":
            self._start = self._random_state()
        return iter(self.loader)

    def _next_epoch(self) -> None:
        self.epoch, self.batch, self._samples = self.epoch + 1, 0, 0

    def _set_epoch(self) -> None:
        """Tell everybody who wants to know: a DistributedSampler that is not told repeats its order in each epoch."""
        for part in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(self.epoch)

    def _load(self, inside: dict[str, Any]) -> None:
        loader: Any = self.loader
        loader.load_state_dict(inside)
        # Makes the iterator now, which the loader hands out at the next iter(): else it would draw after the restore.
        loader.state_dict()
        if self.batch:
            self._resumed = lambda: iter(loader)

    def _skipped(self, state: dict[str, Any]) -> Iterator[Any]:
        """Ranks go on together behind what all of them have used, also when there are more or fewer of them now."""
        sampler = self._sampler()
        self._samples = state["samples"] // sampler.world
        sampler.skip(self._samples)
        return iter(self.loader)

    def _replayed(self, start: dict[str, Any]) -> Iterator[Any]:
        self._start = start
        if self.epoch and _persistent(self.loader):
            iter(self.loader)  # later epochs of live workers draw no base seed
        rng.restore(start["global"])
        for name, generator in self.generators().items():
            generator.set_state(start[name].clone())
        iterator = iter(self.loader)
        for _ in range(self.batch):
            next(iterator)
        return iterator

    def _random_state(self) -> dict[str, Any]:
        own = {name: generator.get_state() for name, generator in self.generators().items()}
        return {"global": rng.capture(), **own}

    def _sampler(self) -> ResumableSampler:
        sampler = self.loader.sampler
        assert isinstance(sampler, ResumableSampler), "the way is chosen by it"
        return sampler

    def _length(self) -> int | None:
        """Batches in an epoch; None where nobody knows beforehand."""
        dataset = self.loader.dataset
        return None if isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__") else len(self.loader)

    def _what_changed(self, state: dict[str, Any]) -> list[str]:
        now = self._length()
        return [] if state["length"] == now else [f"{self.name} had {state['length']} batches in an epoch, now {now}"]

    def _doubts(self) -> list[str]:
        if isinstance(self.loader.dataset, SeededDataset):
            return []
        if self.way == "replaying" and self.batch:
            slow = (
                f"{self.name}: {self.batch} batches were read again to find the place; ResumableSampler would skip them"
            )
            lost = [f"{self.name}: persistent workers begin with new random states"] if _persistent(self.loader) else []
            return [slow, *lost]
        if self.loader.num_workers and self.way != "replaying":
            return [
                f"{self.name}: workers begin with new random states; exact unless samples draw from global generators"
            ]
        return []


def _way_of(loader: DataLoader[Any]) -> Way:
    if hasattr(loader, "state_dict"):
        return "stateful"
    return "skipping" if isinstance(loader.sampler, ResumableSampler) and loader.batch_size else "replaying"


def _persistent(loader: DataLoader[Any]) -> bool:
    return bool(loader.persistent_workers and loader.num_workers)
