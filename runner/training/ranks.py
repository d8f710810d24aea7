"""The processes that train together: who this one is, and how all of them agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among ``world``. Its group talks over the CPU (gloo), beside the training's own."""

    rank: int
    world: int
    group: Any = None

    def highest(self, *numbers: int) -> list[int]:
        """The highest of what all ranks say, number by number. Every rank must call it, at the same point."""
        if self.world == 1:
            return list(numbers)
        said = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(said, op=distributed.ReduceOp.MAX, group=self.group)
        return [int(number) for number in said]

    def first_says(self, number: int) -> int:
        """What rank 0 says. Every rank must call it, at the same point."""
        return self.highest(number if self.rank == 0 else -(2**62))[0]


def this_process() -> Ranks:
    """Ask torch.distributed; without it the process is alone. A collective call where there are several.

    Raises RuntimeError when a launcher started several ranks and the script has not yet joined them.
    """
    if distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        group = distributed.new_group(backend="gloo") if world > 1 else None
        return Ranks(distributed.get_rank(), world, group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "WORLD_SIZE says that there are several ranks, and torch.distributed is not initialized. "
            "Call torch.distributed.init_process_group before making the Checkpointer."
        )
    return Ranks(0, 1)
