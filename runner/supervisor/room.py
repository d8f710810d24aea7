"""Room for the next checkpoints, when the disk runs short: what is stored elsewhere, or rubbish, goes first."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from runner.checkpoint.local import delete, scan
from runner.checkpoint.transfer import list_stored
from runner.core.events import Noticed
from runner.core.state import Checkpoint
from runner.errors import StoreError
from runner.supervisor.recovery import Ground
from runner.supervisor.session import Session
from runner.units import format_size

# A trainer writes the next checkpoint before it deletes an old one.
CHECKPOINTS_AHEAD = 2


def make_room(session: Session, ground: Ground, wanted: Checkpoint) -> None:
    """See that checkpoints like ``wanted`` fit, which itself stays. A complete one goes only if it is stored."""
    folders = session.folders(ground.run)
    needed = CHECKPOINTS_AHEAD * wanted.bytes
    if free(folders.checkpoints) >= needed:
        return
    for path in expendable(session, ground, wanted):
        session.post(Noticed(f"the disk is nearly full: {path.name} is deleted here; it is stored, or unfinished"))
        delete(path)
        if free(folders.checkpoints) >= needed:
            return
    session.cache.make_room(needed)
    missing = needed - free(folders.checkpoints)
    if missing > 0:
        session.post(Noticed(f"the disk is nearly full: {format_size(missing)} are missing for the next checkpoints"))


def expendable(session: Session, ground: Ground, wanted: Checkpoint) -> Iterator[Path]:
    """What may go, the least useful first: unfinished saves that were set aside, then what is stored, oldest first."""
    folders, wanted_format = session.folders(ground.run), session.spec.checkpoints.format
    yield from (found.path for found in scan(folders.set_aside, wanted_format) if not found.verdict.complete)
    stored = stored_signatures(session, ground) - {wanted.signature}
    here = [found for found in scan(folders.checkpoints, wanted_format) if found.signature in stored]
    yield from (found.path for found in sorted(here, key=lambda found: found.newest_mtime))


def stored_signatures(session: Session, ground: Ground) -> set[str]:
    """What the store has for certain; a store that does not answer vouches for nothing."""
    try:
        told = list_stored(session.store, session.keys, ground.run)
    except StoreError as error:
        session.post(Noticed(f"no room is made among stored checkpoints, since the store does not answer: {error}"))
        return set()
    return {one.signature for one in told if isinstance(one, Checkpoint)}


def free(folder: Path) -> int:
    """Bytes that an ordinary user may still write there."""
    return shutil.disk_usage(folder).free
