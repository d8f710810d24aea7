"""All of a training's state at one step: taken, and put back in the order that makes a resume exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.training import environment, rng, sharded
from runner.training.digest import Kind, state_digest
from runner.training.folder import FORMAT, VERSION, check, read_meta, tensors_name
from runner.training.image import Image, image_of, load_image
from runner.training.loading import TrackedLoader
from runner.training.parts import Generator, Part, Stateful, Weights
from runner.training.ranks import Ranks
from runner.training.state import Copies, pack, unpack

Parts = Mapping[str, Part]


class Mismatch(ValueError):
    """The checkpoint does not hold what this script wants to restore."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves: its safetensors image, its JSON, and its part of the sharded tensors (mostly none)."""

    image: Image
    meta: bytes
    shards: Mapping[str, Tensor]
    digest: str


@dataclass(frozen=True, slots=True)
class Occasion:
    """Why and when a snapshot is taken."""

    step: int
    reason: str
    metrics: Mapping[str, float]
    digest: Kind | None


def take(parts: Parts, ranks: Ranks, occasion: Occasion) -> Snapshot:
    """The state as it is. The tensors in the image are the live ones: copy them before the next step.

    Raises NotStorable for values that no checkpoint can hold.
    """
    spread = bool(_meshes(parts))
    common = common_state(parts) if ranks.rank == 0 or spread else {}
    kind = occasion.digest if ranks.rank == 0 else None
    digest = state_digest(common, full=kind == "full") if kind else ""
    shared, own = pack(common, "state"), pack(_own_state(parts), "own")
    first = ranks.rank == 0
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "step": occasion.step,
        "rank": ranks.rank,
        "world": ranks.world,
        "reason": occasion.reason,
        "metrics": dict(occasion.metrics),
        "environment": environment.record(ranks.world),
        "state": shared.plan if first else None,
        "sharded": sharded.layouts(shared.sharded) if first else {},
        "own": own.plan,
        "digest": {"kind": kind, "value": digest} if digest else None,
    }
    tensors = {**shared.tensors, **own.tensors} if first else own.tensors
    return Snapshot(image_of(tensors), json.dumps(meta).encode(), shared.sharded, digest)


def size_of(parts: Parts, ranks: Ranks) -> int:
    """Bytes of the image that :func:`take` would make on this rank, but for a few kilobytes of its own state."""
    return image_of(pack(common_state(parts), "state").tensors).size if ranks.rank == 0 else 0


def put_back(parts: Parts, ranks: Ranks, folder: Path) -> list[str]:
    """Bring all parts to where they were when ``folder`` was saved; returns in words what is not exact.

    Order: weights, optimizers and the like; loaders, whose iterators are made and draw from torch's generator; then
    generators and global random states. Raises DamagedCheckpoint or Mismatch; the parts are then in no good state.
    """
    meta = check(folder)
    tensors = load_image(folder / tensors_name(0))
    said = _put_back_common(parts, ranks, folder, meta, tensors)
    mine = read_meta(folder, ranks.rank)
    if mine is not None and ranks.rank:
        tensors = load_image(folder / tensors_name(ranks.rank))
    own = unpack((mine or meta)["own"], Copies(tensors))
    said += _put_back_loaders(parts, own["parts"])
    if mine is not None:
        _put_back_random(parts, own)
    return said + _what_differs(parts, ranks, meta)


def common_state(parts: Parts) -> dict[str, Any]:
    """The state of all that is the same on every rank."""
    return {name: part.state() for name, part in parts.items() if not part.own}


def _own_state(parts: Parts) -> dict[str, Any]:
    """What each rank has of its own. The random states come last: a loader may draw while it tells its state."""
    own = {name: part.state() for name, part in parts.items() if part.own}
    generators = {
        name: {key: generator.get_state() for key, generator in part.generators().items()}
        for name, part in parts.items()
        if isinstance(part, TrackedLoader)
    }
    return {"parts": own, "generators": generators, "random": rng.capture()}


def _put_back_common(
    parts: Parts, ranks: Ranks, folder: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[str]:
    plans = meta["state"]["map"]
    wanted = {name: part for name, part in parts.items() if not part.own}
    missing = sorted(set(wanted) - set(plans))
    if missing:
        raise Mismatch(
            f"{folder} holds {', '.join(sorted(plans))}, but not {', '.join(missing)}, which this script wants. "
            "Leave it out of the Checkpointer until a checkpoint has it, or start anew."
        )
    if meta["sharded"]:
        tensors = {**tensors, **sharded.load(meta["sharded"], _meshes(parts), folder, ranks)}
    said = []
    for name, part in wanted.items():
        said += part.restore(unpack(plans[name], tensors if isinstance(part, Weights) else Copies(tensors)))
    return said


def _put_back_loaders(parts: Parts, own: Mapping[str, Any]) -> list[str]:
    said = []
    for name, part in parts.items():
        if part.own and name not in own:
            said.append(f"{name} is not in the checkpoint and begins anew")
        elif part.own and not isinstance(part, Generator):
            said += part.restore(own[name])
    return said


def _put_back_random(parts: Parts, own: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        if isinstance(part, Generator) and name in own["parts"]:
            part.restore(own["parts"][name])
        if isinstance(part, TrackedLoader):
            for key, generator in part.generators().items():
                if key in own["generators"].get(name, {}):
                    generator.set_state(own["generators"][name][key])
    rng.restore(own["random"])


def _what_differs(parts: Parts, ranks: Ranks, meta: Mapping[str, Any]) -> list[str]:
    now = environment.record(ranks.world)
    said = environment.differences(meta["environment"], now) + environment.doubts(now)
    unused = sorted(set(meta["state"]["map"]) - set(parts))
    said += [f"the checkpoint also holds {name}, which is not restored" for name in unused]
    known = meta["digest"]
    if known and ranks.rank == 0 and ranks.world == meta["world"] and not unused:
        value = state_digest(common_state(parts), full=known["kind"] == "full")
        if value != known["value"]:
            said.append(f"the restored state has the digest {value}, the saved one had {known['value']}")
    return said


def _meshes(parts: Parts) -> list[Any]:
    things: list[object] = [part.module for part in parts.values() if isinstance(part, Weights)]
    things += [part.thing for part in parts.values() if isinstance(part, Stateful)]
    return sharded.meshes_of(things)
