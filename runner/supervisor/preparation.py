"""What an attempt needs before it can start: the setup script, the data, the checkpoint to go on from."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from runner.checkpoint.local import clear_unfinished, scan, set_aside
from runner.checkpoint.transfer import restore
from runner.core.events import Noticed
from runner.core.state import Checkpoint
from runner.dataset.sync import Dataset
from runner.errors import CloudrunError, CorruptData, DiskFull
from runner.files import make_directory, sync_directory, write_atomically
from runner.supervisor.attempt import Child, open_log
from runner.supervisor.output import Progress
from runner.supervisor.recovery import Ground
from runner.supervisor.session import Session


class SetupFailed(CloudrunError):
    """The owner's setup script did not work on this machine."""


class Preparation:
    """Makes this machine ready; holds the datasets in use until it is closed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._in_use = ExitStack()
        self._setup: Child | None = None

    def prepare(self, ground: Ground, attempt: int) -> None:
        """Setup and data. Raises CloudrunError."""
        folders = self._session.folders(ground.run)
        for folder in (folders.checkpoints, folders.tmp):
            make_directory(folder)
        self._run_setup(ground, attempt)
        place_data(self.data_dir(ground.run), self._bring_data())

    def close(self) -> None:
        """End a setup script that still runs; let go of the datasets."""
        if self._setup is not None:
            self._setup.trainer.kill()
        self._in_use.close()

    def data_dir(self, run: int) -> Path:
        return self._session.local.run_cache(run) / "data"

    def _bring_data(self) -> list[tuple[str, Path]]:
        session = self._session
        placed = []
        for target, source in session.sources:
            dataset: Dataset = session.cache.sync(source, report=session.progress, stop=session.leaving)
            self._in_use.enter_context(session.cache.use(dataset))
            placed.append((target, dataset.path))
        return placed

    def _run_setup(self, ground: Ground, attempt: int) -> None:
        """Once per machine and per text of the script."""
        session, text = self._session, self._session.spec.setup
        if not text:
            return
        done = session.local.setup_done(hashlib.sha256(text.encode()).hexdigest()[:16])
        if done.exists():
            return
        env = {**session.environ, **session.spec.environment(session.environ)}
        self._setup = Child(session, open_log(session, ground.run, attempt), ignore_progress)
        self._setup.start(["bash", "-c", text], env, session.spec.working_directory)
        ended = self._setup.wait()
        tail, self._setup = self._setup.tail.lines(), None
        if ended.returncode != 0:
            why = ended.spawn_error or f"exit code {ended.returncode}"
            said = f": {tail[-1]}" if tail else ""
            raise SetupFailed(f"the setup script failed ({why}){said}", "its output is in: cloudrun logs")
        write_atomically(done, b"")


def ignore_progress(progress: Progress) -> None:
    """A setup script has no steps."""


def place_data(data_dir: Path, datasets: list[tuple[str, Path]]) -> None:
    """Make ``data_dir`` show the datasets: one without a target is the data directory itself."""
    make_directory(data_dir.parent)
    if len(datasets) == 1 and not datasets[0][0]:
        link(data_dir, datasets[0][1])
        return
    if data_dir.is_symlink():
        data_dir.unlink()
    make_directory(data_dir)
    for target, path in datasets:
        place = data_dir / target
        make_directory(place.parent)
        link(place, path)


def link(place: Path, path: Path) -> None:
    """Let ``place`` lead to ``path``, replacing an older link in one step."""
    if place.is_dir() and not place.is_symlink():
        with suppress(FileNotFoundError):
            place.rmdir()
    part = place.with_name(f".{place.name}.new")
    part.unlink(missing_ok=True)
    part.symlink_to(path)
    os.replace(part, place)
    sync_directory(place.parent)


def bring_checkpoint(session: Session, ground: Ground, checkpoint: Checkpoint) -> Path:
    """The verified path of a stored or local checkpoint; whatever could mislead the trainer is moved out of its sight.

    Raises CorruptData or ObjectMissing when this checkpoint cannot be used, other CloudrunErrors when nothing can.
    """
    folders = session.folders(ground.run)
    clear_the_way(session, ground, checkpoint)
    if checkpoint.id.startswith("local:"):
        found = ground.watch.find(checkpoint)
        if found is None or all(one.signature != found.signature for one in scan(folders.checkpoints, "any")):
            raise CorruptData("the files changed since they were complete")
        return found.path
    try:
        return restore(session.store, session.keys, ground.run, checkpoint, folders.checkpoints, stop=session.leaving)
    except DiskFull:
        if not session.cache.make_room(checkpoint.bytes):
            raise
        return restore(session.store, session.keys, ground.run, checkpoint, folders.checkpoints, stop=session.leaving)


def clear_the_way(session: Session, ground: Ground, checkpoint: Checkpoint | None) -> None:
    """Move aside what a trainer that picks its own newest checkpoint would wrongly pick."""
    folders, wanted = session.folders(ground.run), session.spec.checkpoints.format
    moved = clear_unfinished(folders.checkpoints, wanted, folders.set_aside)
    if checkpoint is not None:
        later = [
            one.name
            for one in scan(folders.checkpoints, wanted)
            if one.step is not None and one.step > checkpoint.step and one.verdict.format != "other"
        ]
        set_aside(folders.checkpoints, later, folders.set_aside)
        moved += [(name, f"not usable; resuming from step {checkpoint.step}") for name in later]
    for name, reason in moved:
        session.post(Noticed(f"{name} is set aside: {reason}"))
