"""Room for the next checkpoints, when the disk runs short: what is stored elsewhere, or rubbish, goes first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from runner.checkpoint.copies import CHECKPOINTS_AHEAD
from runner.checkpoint.local import delete, scan
from runner.checkpoint.stored import list_stored
from runner.core.events import Noticed
from runner.core.state import Checkpoint
from runner.errors import StoreError
from runner.storage.local import free_bytes
from runner.supervisor.recovery import Ground
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import places_of
from runner.units import format_size


def make_room(session: Session, ground: Ground, wanted: Checkpoint) -> None:
    """See that checkpoints like ``wanted`` fit, which itself stays. A complete one goes only if it is stored."""
    folder = session.folders(ground.run).checkpoints
    needed = CHECKPOINTS_AHEAD * wanted.bytes
    if free_bytes(folder) >= needed:
        return
    for path in expendable(session, ground, wanted):
        session.post(Noticed(f"the disk is nearly full: {path.name} is deleted here; it is stored, or was set aside"))
        delete(path)
        if free_bytes(folder) >= needed:
            return
    if is_on_one_disk(folder, session.local.cache_dir):
        session.cache.make_room(needed)
    missing = needed - free_bytes(folder)
    if missing > 0:
        session.post(Noticed(f"the disk is nearly full: {format_size(missing)} are missing for the next checkpoints"))


def expendable(session: Session, ground: Ground, wanted: Checkpoint) -> Iterator[Path]:
    """What may go, the least useful first. While the store does not answer, nothing counts as stored."""
    folders = session.folders(ground.run)
    if folders.set_aside.is_dir():
        yield from sorted(folders.set_aside.iterdir())
    try:
        told = list_stored(session.store, session.keys, ground.run)
    except StoreError:
        return
    stored = {one.signature for one in told if isinstance(one, Checkpoint)} - {wanted.signature}
    here = scan(places_of(session, ground.run), session.spec.checkpoints.format)
    spare = [found for found in here if found.signature in stored]
    yield from (found.path for found in sorted(spare, key=lambda found: found.newest_mtime))


def is_on_one_disk(one: Path, other: Path) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev
    except FileNotFoundError:
        return False
