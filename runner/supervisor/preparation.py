"""What an attempt needs before it can start: the setup script, the data, the checkpoint to go on from."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from runner.checkpoint.formats import looks_like_checkpoint
from runner.checkpoint.local import Found, clear_unfinished, delete, is_unchanged, scan, set_aside
from runner.checkpoint.places import Places
from runner.checkpoint.pointers import dangling, lead_to
from runner.checkpoint.restore import restore
from runner.core.events import Noticed
from runner.core.state import Checkpoint
from runner.dataset.sync import Dataset
from runner.errors import CloudrunError, CorruptData, DiskFull, StoreUnreachable
from runner.files import PART_MARK, make_directory, sync_directory, write_atomically
from runner.supervisor.attempt import Child, open_log
from runner.supervisor.output import Progress
from runner.supervisor.recovery import Ground
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import places_of
from runner.supervisor.trainer import Exit

SET_ASIDE_KEPT = 3


class SetupFailed(CloudrunError):
    """The owner's setup script did not work on this machine."""


class Preparation:
    """Makes this machine ready; holds the datasets in use until it is closed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._in_use = ExitStack()
        self._setup: Child | None = None
        self._one_at_a_time = threading.Lock()

    def prepare(self, ground: Ground, attempt: int) -> None:
        """Setup and data. Raises CloudrunError. One that was overtaken by a newer attempt's is waited for."""
        folders = self._session.folders(ground.run)
        with self._one_at_a_time:
            for folder in (folders.checkpoints, folders.tmp):
                make_directory(folder)
            self._set_up(ground, attempt)
            place_data(self.data_dir(ground.run), self._bring_data())

    def warm_up(self) -> None:
        """Bring the data before it is this machine's turn. Raises CloudrunError."""
        with self._one_at_a_time:
            self._bring_data()

    def close(self) -> None:
        """The session is leaving: end a setup script that still runs, let go of the datasets."""
        if (setup := self._setup) is not None:
            setup.trainer.kill()
        self._in_use.close()

    def data_dir(self, run: int) -> Path:
        return self._session.local.run_cache(run) / "data"

    def _bring_data(self) -> list[tuple[str, Path]]:
        session = self._session
        placed = []
        for target, source in session.sources:
            dataset: Dataset = session.cache.sync(source, report=session.progress, stop=session.leaving)
            self._in_use.enter_context(session.cache.use(dataset, stop=session.leaving))
            placed.append((target, dataset.path))
        return placed

    def _set_up(self, ground: Ground, attempt: int) -> None:
        """Once per machine and per text of the script."""
        session, text = self._session, self._session.spec.setup
        if not text:
            return
        done = session.local.setup_done(hashlib.sha256(text.encode()).hexdigest()[:16])
        if done.exists():
            return
        with closing(open_log(session, ground.run, attempt)) as log:
            setup = self._setup = Child(session, log, ignore_progress)
            ended = self._run_setup(setup, text)
        tail, self._setup = setup.tail.lines(), None
        if ended.returncode != 0:
            why = ended.spawn_error or f"exit code {ended.returncode}"
            said = f": {tail[-1]}" if tail else ""
            raise SetupFailed(f"the setup script failed ({why}){said}", "its output is in: cloudrun logs JOB")
        write_atomically(done, b"")

    def _run_setup(self, setup: Child, text: str) -> Exit:
        session = self._session
        env = {**session.environ, **session.spec.environment(session.environ)}
        setup.start(["bash", "-c", text], env, session.spec.working_directory)
        if session.leaving.is_set():  # close() came too early to find something to kill
            setup.trainer.kill()
        return setup.wait()


def ignore_progress(progress: Progress) -> None:
    """A setup script has no steps."""


def place_data(data_dir: Path, datasets: list[tuple[str, Path]]) -> None:
    """Make ``data_dir`` show these datasets only: one without a target is the data directory itself."""
    make_directory(data_dir.parent)
    if data_dir.is_dir() and not data_dir.is_symlink():
        remove_links(data_dir)
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


def remove_links(folder: Path) -> None:
    """Take away what an earlier start has placed: links, and folders with nothing else in them. The rest stays."""
    for entry in list(folder.iterdir()):
        if entry.is_symlink():
            entry.unlink()
        elif entry.is_dir():
            remove_links(entry)
    with suppress(OSError):
        folder.rmdir()


def link(place: Path, path: Path) -> None:
    """Let ``place`` lead to ``path``, replacing an older link in one step."""
    part = place.with_name(f".{place.name}.new")
    part.unlink(missing_ok=True)
    part.symlink_to(path)
    os.replace(part, place)
    sync_directory(place.parent)


def bring_checkpoint(session: Session, ground: Ground, checkpoint: Checkpoint) -> Path:
    """The verified path of a stored or local checkpoint; whatever could mislead the trainer is moved out of its sight.

    Raises CorruptData or ObjectMissing when this checkpoint cannot be used, other CloudrunErrors when nothing can.
    """
    clear_the_way(session, ground, checkpoint)
    path = put_in_place(session, ground, checkpoint)
    lead_to(path)
    return path


def put_in_place(session: Session, ground: Ground, checkpoint: Checkpoint) -> Path:
    """The trainer's own files while they are here and unchanged, else what the store has."""
    if checkpoint.id.startswith("local:"):
        found = ground.watch.on_shelf(checkpoint)
        if found is None or not is_unchanged(found):
            raise CorruptData("the files changed since they were complete")
        return found.path
    try:
        return fetch(session, ground, checkpoint)
    except DiskFull:
        if not session.cache.make_room(checkpoint.bytes):
            raise
        return fetch(session, ground, checkpoint)


def fetch(session: Session, ground: Ground, checkpoint: Checkpoint) -> Path:
    """From the store; or, while that is away, what lies here under the same name with the same files."""
    places = places_of(session, ground.run)
    try:
        return restore(session.store, session.keys, ground.run, checkpoint, places.root, stop=session.leaving)
    except StoreUnreachable as error:
        for found in scan(places, session.spec.checkpoints.format):
            if found.signature == checkpoint.signature and found.verdict.complete:
                session.post(Noticed(f"resuming from this disk, since the store does not answer: {error}"))
                return found.path
        raise


def empty(folder: Path) -> None:
    """Take away what earlier attempts left in their TMPDIR: no trainer runs, and nobody comes back for it."""
    for entry in list(folder.iterdir()):
        delete(entry)


def clear_the_way(session: Session, ground: Ground, checkpoint: Checkpoint | None) -> None:
    """Move aside what a trainer that picks its own newest checkpoint would wrongly pick.

    In a folder of the owner's nothing else is touched: what is called tmp there may be anything. Of what is not whole
    the newest few are kept, of the rest everything.
    """
    folders, wanted = session.folders(ground.run), session.spec.checkpoints.format
    places, whole = places_of(session, ground.run), kept_aside(folders.set_aside)
    moved = []
    if session.spec.checkpoints.dir is None:
        moved = clear_unfinished(folders.checkpoints, wanted, folders.set_aside, keep=SET_ASIDE_KEPT)
    for folder in places.folders():
        for part in folder.glob(f".*{PART_MARK}"):
            delete(part)
    misleading = [(found, reason) for found in scan(places, wanted) if (reason := why_not(found, checkpoint))]
    broken = [found.name for found, _ in misleading if is_broken(found)]
    set_aside(places.root, broken, folders.set_aside, keep=max(SET_ASIDE_KEPT, len(broken)))
    set_aside(places.root, [found.name for found, _ in misleading if not is_broken(found)], whole)
    moved += [(found.name, reason) for found, reason in misleading]
    for name, reason in [*moved, *set_aside_pointers(places, whole)]:
        session.post(Noticed(f"{name} is set aside: {reason}"))


def kept_aside(aside: Path) -> Path:
    """The folder beside ``aside`` for what is whole: nothing in it is ever deleted."""
    return aside.with_name(aside.name.replace("set-aside", "kept-aside"))


def is_broken(found: Found) -> bool:
    return not found.verdict.complete and found.verdict.format != "other"


def set_aside_pointers(places: Places, target: Path) -> list[tuple[str, str]]:
    """The trainer's notes of its newest checkpoint, where that is gone; (name, reason) each."""
    moved = []
    for folder in places.folders():
        names = dangling(folder)
        set_aside(folder, names, target)
        moved += [(name, "it names a checkpoint that is not there") for name in names]
    return moved


def why_not(found: Found, resuming: Checkpoint | None) -> str:
    """Why an entry among the checkpoints would mislead the trainer, or be lost; empty when neither is so."""
    if resuming is not None and is_in_the_way(found, resuming):
        return f"step {resuming.step} comes back to its place"
    if found.verdict.format == "other":
        return ""
    if not found.verdict.complete:
        return found.verdict.reason if looks_like_checkpoint(found.path.name, is_dir=found.is_dir) else ""
    if resuming is None or found.step is None or found.step <= resuming.step:
        return ""
    return f"not usable; resuming from step {resuming.step}"


def is_in_the_way(found: Found, resuming: Checkpoint) -> bool:
    """True for what has the name of the checkpoint that is to be restored, and may be anything else of the owner's."""
    is_another = found.name == resuming.name and found.signature != resuming.signature
    unknown = found.verdict.format == "other" or (found.verdict.complete and found.step is None)
    return is_another and unknown and not resuming.id.startswith("local:")
