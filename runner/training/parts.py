"""How each kind of thing that a training consists of gives its state and takes it back."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from runner.training.loading import TrackedLoader

_COMPILED = "_orig_mod."
_OTHER_BUCKETS = (
    "DDP adds the gradients of more than 2 ranks in another order in the first step of each process "
    "(a forward and backward before restore() uses that step up)"
)


class Part(Protocol):
    """One entry of the state: the same on every rank (weights), or each rank's own (random states, positions)."""

    @property
    def own(self) -> bool:
        """True when each rank has one of its own."""
        ...

    def state(self) -> Any:
        """The present state. Tensors in it may be the live ones."""
        ...

    def restore(self, state: Any) -> list[str]:
        """Take back a state, and keep its tensors if need be; returns in words what is doubtful about it."""
        ...


class Weights:
    """A module. What wraps it (DDP, torch.compile) leaves no trace in the state, and need not be there again.

    It copies what it is given, which may therefore be a view into a file.
    """

    own = False

    def __init__(self, module: nn.Module) -> None:
        self.module = _unwrapped(module)
        self._reduced = isinstance(module, nn.parallel.DistributedDataParallel)

    def state(self) -> Any:
        return _renamed(self.module.state_dict(), _plain)

    def restore(self, state: Any) -> list[str]:
        mine = self.module.state_dict()
        names = {_plain(name): name for name in (*mine, *getattr(mine, "_metadata", ()))}
        self.module.load_state_dict(_renamed(state, lambda name: names.get(name, name)))
        if self._reduced and distributed.get_world_size() > 2:
            return [_OTHER_BUCKETS]
        return []


class Stateful:
    """Anything with ``state_dict`` and ``load_state_dict``: optimizer, scheduler, scaler, average, sampler."""

    def __init__(self, thing: Any, *, own: bool) -> None:
        self.thing = thing
        self.own = own

    def state(self) -> Any:
        return self.thing.state_dict()

    def restore(self, state: Any) -> list[str]:
        self.thing.load_state_dict(state)
        return []


class Values:
    """A dictionary of plain values, such as the best loss so far; restored in place."""

    own = False

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self.values = values

    def state(self) -> Any:
        return dict(self.values)

    def restore(self, state: Any) -> list[str]:
        self.values.clear()
        self.values.update(state)
        return []


class Generator:
    """An explicit random generator. Restored with the global ones, after the loaders."""

    own = True

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state(self) -> Any:
        return self.generator.get_state()

    def restore(self, state: Any) -> list[str]:
        self.generator.set_state(state)
        return []


def part_of(name: str, thing: Any, *, own: bool = False) -> Part:
    """The part that knows how to handle ``thing``. Raises TypeError for what has no state."""
    if isinstance(thing, DataLoader):
        return TrackedLoader(name, thing)
    if isinstance(thing, torch.Generator):
        return Generator(thing)
    if isinstance(thing, nn.Module) and not own:
        return Weights(thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return Stateful(thing, own=own)
    if isinstance(thing, MutableMapping):
        return Values(thing)
    raise TypeError(
        f"state[{name!r}] is a {type(thing).__qualname__}, which has no state_dict and load_state_dict. "
        "Give an object that has both, a DataLoader, a torch.Generator or a dict of plain values."
    )


def _unwrapped(module: nn.Module) -> nn.Module:
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(module, wrappers) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, wrappers) else module._orig_mod  # type: ignore[assignment]  # noqa: SLF001
    return module


def _renamed(state: Any, rename: Callable[[str], str]) -> Any:
    """A module's state with other names; the versions of its parts, which it carries as an attribute, go along."""
    renamed = type(state)((rename(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        versions = state._metadata  # noqa: SLF001 (torch's own way)
        renamed._metadata = type(versions)((rename(name), value) for name, value in versions.items())  # noqa: SLF001
    return renamed


def _plain(name: str) -> str:
    """A name inside a module, without what torch.compile adds. A module's own prefix ends without the dot."""
    return (name + ".").replace(_COMPILED, "").removesuffix(".")
