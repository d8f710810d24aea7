"""What the store has of a run: a checkpoint exists exactly when its manifest does.

The manifest is written last and deleted first, so a process may die at any point and leave nothing that looks like a
checkpoint and is none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runner.checkpoint.layout import StoreLayout, parse_checkpoint_id
from runner.checkpoint.manifest import (
    MAX_BYTES,
    Manifest,
    parse_manifest,
    to_checkpoint,
)
from runner.checkpoint.side_by_side import WORKERS, Halt, side_by_side
from runner.core.state import Checkpoint, age
from runner.errors import (
    CorruptData,
    ObjectMissing,
)
from runner.storage.api import ObjectInfo, ObjectStore

LEFTOVER_AGE_S = 86400.0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A committed checkpoint that cannot be used, and why."""

    id: str
    step: int
    reason: str


def list_stored(
    store: ObjectStore, layout: StoreLayout, run: int, *, workers: int = WORKERS
) -> list[Checkpoint | Unreadable]:
    """The committed checkpoints of a run, best first.

    From one listing, and one read per manifest: a checkpoint with missing or short objects is told as Unreadable
    without a download. Errors of the store itself are raised.
    """
    objects = _by_checkpoint(store, layout, run)
    committed = [name for name in objects if layout.manifest(run, name) in objects[name]]

    def work(name: str, _halt: Halt) -> Checkpoint | Unreadable | None:
        return _examine(store, layout, run, name, objects[name])

    told = [one for one in side_by_side(work, committed, workers, threading.Event()) if one is not None]
    return sorted(told, key=lambda one: age(one) if isinstance(one, Checkpoint) else (0, one.step, 0.0), reverse=True)


def _by_checkpoint(store: ObjectStore, layout: StoreLayout, run: int) -> dict[str, dict[str, ObjectInfo]]:
    """Checkpoint id -> key -> object. Foreign keys are left out."""
    groups: dict[str, dict[str, ObjectInfo]] = {}
    for info in store.list(layout.checkpoints_prefix(run)):
        parsed = layout.parse_checkpoint_key(run, info.key)
        if parsed is not None:
            groups.setdefault(parsed.id, {})[info.key] = info
    return groups


def _examine(
    store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str, objects: Mapping[str, ObjectInfo]
) -> Checkpoint | Unreadable | None:
    """None when it was removed since the listing."""
    if objects[layout.manifest(run, checkpoint)].size > MAX_BYTES:
        return _unreadable(checkpoint, "bad manifest: it is absurdly large")
    try:
        manifest = read_manifest(store, layout, run, checkpoint)
        check_sizes(manifest, layout.checkpoint_prefix(run, checkpoint), objects)
    except ObjectMissing:
        return None
    except CorruptData as error:
        return _unreadable(checkpoint, error.message)
    return to_checkpoint(manifest)


def _unreadable(checkpoint: str, reason: str) -> Unreadable:
    name = parse_checkpoint_id(checkpoint)
    return Unreadable(checkpoint, name.step if name else 0, reason)


def check_sizes(manifest: Manifest, prefix: str, objects: Mapping[str, ObjectInfo]) -> None:
    """Raise CorruptData unless the store has every file of the manifest, as long as it should be."""
    for file in manifest.files:
        info = objects.get(prefix + file.path)
        if info is None:
            raise CorruptData(f"{file.path} is missing in the store")
        if info.size != file.size:
            raise CorruptData(f"{file.path} has {info.size} bytes in the store, its manifest says {file.size}")


def read_manifest(store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str) -> Manifest:
    """Raises ObjectMissing where there is none, CorruptData where it is bad or another checkpoint's."""
    manifest = parse_manifest(store.read(layout.manifest(run, checkpoint)))
    if (manifest.job, manifest.run, manifest.id) != (layout.job, run, checkpoint):
        raise CorruptData(f"bad manifest: it is of {manifest.job}, run {manifest.run}, {manifest.id}")
    return manifest


def sweep(store: ObjectStore, layout: StoreLayout, run: int, now: float) -> None:
    """Delete the files of uploads that were never committed, once all of them are a day old.

    ``now`` is epoch seconds. Younger ones stay: another machine's upload may be going on.
    """
    store.sweep(layout.run_prefix(run), now - LEFTOVER_AGE_S)
    for checkpoint, objects in _by_checkpoint(store, layout, run).items():
        old = all(now - info.modified > LEFTOVER_AGE_S for info in objects.values())
        if old and not _is_committed(store, layout, run, checkpoint):
            store.delete(sorted(objects))


def _is_committed(store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str) -> bool:
    """Asked just before a deletion: the listing may be old by now."""
    try:
        store.read(layout.manifest(run, checkpoint))
    except ObjectMissing:
        return False
    return True


def remove(store: ObjectStore, layout: StoreLayout, run: int, ids: Iterable[str]) -> None:
    """Delete checkpoints: all manifests first, then the files. A death in between leaves only garbage."""
    ids = list(ids)
    store.delete([layout.manifest(run, checkpoint) for checkpoint in ids])
    for checkpoint in ids:
        store.delete([info.key for info in store.list(layout.checkpoint_prefix(run, checkpoint))])
