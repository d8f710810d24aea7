"""States of which each rank holds a part (FSDP2, DTensor): saved and loaded by torch's distributed checkpoint.

The folder takes DCP's files beside ours, and can be loaded by another number of ranks: DCP cuts the tensors anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.training.image import DamagedCheckpoint
from runner.training.optional import is_dtensor
from runner.training.ranks import Ranks
from runner.training.state import NotStorable


def meshes_of(things: Iterable[object]) -> list[Any]:
    """The device meshes over which modules and optimizers are spread; empty when nothing is sharded."""
    tensors = [tensor for thing in things for tensor in _parameters(thing)]
    return [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]


def layouts(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape, dtype, placements and mesh of each DTensor, as JSON. Raises NotStorable for placements we do not know."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "placements": [_placement(name, placement) for placement in tensor.placements],
            "mesh": _mesh_key(tensor.device_mesh),
        }
        for name, tensor in tensors.items()
    }


def save(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write every rank's part into ``folder``, synced. Every rank must call it; all raise OSError when one cannot."""
    dcp = _dcp()
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, sync_files=True), process_group=ranks.group)
    except dcp.CheckpointException as error:
        raise OSError(f"the sharded tensors could not be written: {error}") from error


def load(
    saved: Mapping[str, Mapping[str, Any]], meshes: Iterable[Any], folder: Path, ranks: Ranks
) -> dict[str, Tensor]:
    """The DTensors that :func:`layouts` described, over this process's meshes. Every rank must call it.

    Raises DamagedCheckpoint when they cannot be read.
    """
    dcp = _dcp()
    by_key = {tuple(_mesh_key(mesh)): mesh for mesh in meshes}
    tensors = {name: _empty(name, layout, by_key) for name, layout in saved.items()}
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), process_group=ranks.group)
    except dcp.CheckpointException as error:
        raise DamagedCheckpoint(f"the sharded tensors of {folder} cannot be read: {error}") from error
    return tensors


def load_whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a DCP folder, whole, in one process that needs no other ranks."""
    dcp = _dcp()
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def _dcp() -> Any:
    """Heavy, and needed for sharded states only."""
    from torch.distributed import checkpoint  # noqa: PLC0415 (see above)

    return checkpoint


def _parameters(thing: object) -> list[Any]:
    if isinstance(thing, nn.Module):
        return list(thing.parameters())
    groups = getattr(thing, "param_groups", [])
    return [parameter for group in groups for parameter in group["params"]]


def _mesh_key(mesh: Any) -> list[str]:
    """Meshes are told apart by the names of their dimensions; unnamed ones by how many they have."""
    return list(mesh.mesh_dim_names or [f"dimension {place}" for place in range(mesh.ndim)])


def _placement(name: str, placement: Any) -> int | None:
    """The dimension along which a tensor is cut, or None where every rank has all of it."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 (absent before torch 2.5)

    if type(placement) is Shard:
        return int(placement.dim)
    if type(placement) is Replicate:
        return None
    raise NotStorable(name, f"a DTensor placed as {placement}, neither sharded evenly nor replicated")


def _empty(name: str, layout: Mapping[str, Any], meshes: Mapping[tuple[str, ...], Any]) -> Any:
    from torch.distributed.tensor import Replicate, Shard, empty  # noqa: PLC0415 (absent before torch 2.5)

    mesh = meshes.get(tuple(layout["mesh"]))
    if mesh is None:
        raise DamagedCheckpoint(f"{name} was spread over {layout['mesh']}; this run has no such device mesh")
    placements = [Replicate() if dim is None else Shard(dim) for dim in layout["placements"]]
    dtype = getattr(torch, layout["dtype"])
    return empty(*layout["shape"], dtype=dtype, device_mesh=mesh, placements=placements)
