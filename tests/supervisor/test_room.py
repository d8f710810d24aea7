"""Room on a disk that is nearly full: what goes, and what never does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.checkpoint.local import scan
from runner.core.state import Checkpoint
from runner.dataset.source import Source
from runner.errors import StoreUnreachable
from runner.storage.memory import Fault, MemoryStore
from runner.supervisor.recovery import Ground
from runner.supervisor.room import make_room
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import ShelfWatch
from tests.supervisor.sessions import make_session, save

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def ground_of(session: Session) -> Ground:
    return Ground(1, ShelfWatch(session, session.folders(1).checkpoints), "1")


def too_large(folder: Path) -> Checkpoint:
    """The newest checkpoint there, as if the next one would not fit."""
    return scan(folder)[-1].as_checkpoint(2)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        file.truncate(0)
        try:
            while True:
                file.write(b"\0" * 256)
        except OSError:
            return


def test_a_store_that_is_away_is_no_reason_not_to_start(tmp_path: Path, small_disk: Path) -> None:
    away = MemoryStore(lambda operation, key, nth: Fault(StoreUnreachable("away")) if operation == "list" else None)
    session, posted = make_session(tmp_path, f"checkpoints: {{dir: {small_disk}}}", store=away)
    save(small_disk, 1)
    save(small_disk, 2)
    fill(small_disk)
    make_room(session, ground_of(session), too_large(small_disk))
    assert {"step-1.pt", "step-2.pt"} < set(os.listdir(small_disk)), "nothing goes that may not be stored"
    assert "missing for the next checkpoints" in str(posted[-1])


def test_a_cache_on_another_disk_is_left_alone(tmp_path: Path, small_disk: Path) -> None:
    session, _ = make_session(tmp_path, f"checkpoints: {{dir: {small_disk}}}")
    session.cache.sync(Source("memory://data", MemoryStore(objects={"file": b"x"})))
    save(small_disk, 1)
    fill(small_disk)
    wanted = Checkpoint("id", 1, "step-1.pt", 1, 1, 1 << 62, "other", 0.0)
    make_room(session, ground_of(session), wanted)
    assert len(session.cache.entries()) == 1
