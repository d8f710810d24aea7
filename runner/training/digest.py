"""A digest of the state, so that two runs can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from runner.training.state import pack

Kind = Literal["sampled", "full"]
_SAMPLES = 1024
_STAGE = 4 * 1024 * 1024


def state_digest(state: object, full: bool = False) -> str:
    """A hash (blake2b, 32 hex digits) of nested state: names, types, shapes and values.

    Full, it changes with every bit. Sampled, it reads about a thousand values of each tensor, spread evenly: cheap, and
    enough to see two trainings part, since a difference spreads to all values within a step. Of a DTensor, each
    rank sees its own shard.
    """
    packed = pack(state, "state")
    hasher = hashlib.blake2b(json.dumps(packed.plan, sort_keys=True).encode(), digest_size=16)
    shards: dict[str, Any] = dict(packed.sharded)
    local = {name: tensor.to_local() for name, tensor in shards.items()}
    for name, tensor in sorted({**packed.tensors, **local}.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in _pieces(tensor.detach(), full):
            hasher.update(piece)
    return hasher.hexdigest()


def _pieces(tensor: Tensor, full: bool) -> Iterator[bytes]:
    flat = tensor.reshape(-1)
    if not full:
        flat = flat[:: max(1, len(flat) // _SAMPLES)]
    flat = flat.contiguous().view(torch.uint8)
    for start in range(0, len(flat), _STAGE):
        yield _bytes(flat[start : start + _STAGE].cpu())


def _bytes(piece: Tensor) -> bytes:
    """Without numpy, which torch can do without."""
    buffer = bytearray(len(piece))
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(piece)
    return bytes(buffer)
