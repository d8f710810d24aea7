"""Start is recover: what exists of a job, in the store and on this disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.local import Found, scan, set_aside
from runner.checkpoint.transfer import Unreadable, list_stored, read_manifest
from runner.core.events import Recovered
from runner.core.state import Checkpoint, Rejected
from runner.files import write_atomically
from runner.launch.environment import threads_of_this_machine
from runner.supervisor.history import local_segments
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import ShelfWatch

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Ground:
    """What a session stands on once it has recovered. ``threads`` is the run's thread count, on every machine."""

    run: int
    watch: ShelfWatch
    threads: str


def recover(session: Session) -> tuple[Ground, Recovered]:
    """Find the run to go on with, or begin one. Raises CloudrunError when the store cannot be asked."""
    keys = [info.key for info in session.store.list(session.keys.prefix())]
    runs = {run for key in keys if (run := session.keys.run_of(key)) is not None}
    run = max(runs, default=0) + 1 if session.fresh or not runs else max(runs)
    write_spec(session, run, new=run not in runs)
    told = list_stored(session.store, session.keys, run) if run in runs else []
    stored = tuple(one for one in told if isinstance(one, Checkpoint))
    folder = session.folders(run).checkpoints
    if session.fresh:
        clear_for_a_new_run(session, run, folder)
    note = read_trained(session, run)
    watch = ShelfWatch(session, folder)
    local = local_checkpoints(watch.first_look(clean_exit=note is not None), stored)
    known = {one.signature for one in (*stored, *local)}
    return Ground(run, watch, threads_of(session, run, stored)), Recovered(
        run=run,
        attempt=last_attempt(session, run, keys),
        stored=stored,
        local=local,
        rejected=tuple(Rejected(one.id, one.step, one.reason) for one in told if isinstance(one, Unreadable)),
        done=session.keys.done(run) in keys,
        trained=note is not None and (note.signature is None or note.signature in known),
    )


def write_spec(session: Session, run: int, *, new: bool) -> None:
    """Keep the spec's text in the run, as it is written: with no variable filled in, so with no secret."""
    key, text = session.keys.job_yaml(run), session.secrets.redact(session.spec.raw_text.encode())
    stored = {info.key for info in session.store.list(key)}
    if new or key not in stored or session.store.read(key) != text:
        session.store.write(key, text)


def clear_for_a_new_run(session: Session, run: int, folder: Path) -> None:
    """In a folder of the owner's, checkpoints of an older run must not pass for the new one's."""
    old = [found.name for found in scan(folder, session.spec.checkpoints.format) if found.verdict.format != "other"]
    set_aside(folder, old, session.folders(run).set_aside, keep=max(len(old), 3))


def local_checkpoints(found: list[Found], stored: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """What this disk has and the store has not. A name that tells no step counts as the step after the newest."""
    known = {one.signature for one in stored}
    newest = max((one.step for one in stored), default=0)
    fresh = [one for one in found if one.signature not in known]
    return tuple(one.as_checkpoint(one.step if one.step is not None else newest + 1) for one in fresh)


def last_attempt(session: Session, run: int, keys: list[str]) -> int:
    """The highest attempt number in use, in the store or in records here that have not been stored yet."""
    stored = [session.keys.attempt_of(key) or 0 for key in keys if session.keys.run_of(key) == run]
    here = [segment.attempt for kind in ("journal", "logs") for segment in local_segments(session.local, run, kind)]
    return max([0, *stored, *here])


def threads_of(session: Session, run: int, stored: tuple[Checkpoint, ...]) -> str:
    """The thread count that the run's checkpoints were made with, else this machine's."""
    if stored:
        newest = max(stored, key=lambda one: (one.step, one.time))
        recorded = read_manifest(session.store, session.keys, run, newest.id).environment.get(THREADS)
        if recorded:
            return recorded
    return threads_of_this_machine()


@dataclass(frozen=True, slots=True)
class TrainedNote:
    """Training has ended; ``signature`` is that of its newest checkpoint."""

    signature: str | None


def note_trained(session: Session, run: int, signature: str | None) -> None:
    write_atomically(session.local.trained, json.dumps({"run": run, "signature": signature}).encode())


def read_trained(session: Session, run: int) -> TrainedNote | None:
    """The note of this run, if there is one. What cannot be read is no note: training again is safe."""
    try:
        note = json.loads(session.local.trained.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(note, dict) or note.get("run") != run:
        return None
    signature = note.get("signature")
    return TrainedNote(signature if isinstance(signature, str) else None)
