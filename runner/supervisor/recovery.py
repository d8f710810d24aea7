"""Start is recover: what exists of a job, in the store and on this disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from runner.checkpoint.layout import LocalLayout, StoreLayout
from runner.checkpoint.local import Found, scan, set_aside
from runner.checkpoint.manifest import THREADS, Manifest
from runner.checkpoint.places import Places
from runner.checkpoint.stored import Unreadable, list_stored, read_manifest
from runner.core.events import Noticed, Recovered
from runner.core.ledger import Account, fold, history
from runner.core.state import NO_HISTORY, Checkpoint, History, Rejected, age, place
from runner.errors import CorruptData, ObjectMissing, StoreError
from runner.files import write_atomically
from runner.launch.environment import threads_of_this_machine
from runner.storage.api import find
from runner.supervisor.history import journal_lines, local_segments, stored_attempts, stored_runs
from runner.supervisor.lease_body import Note, read_note, write_note
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import ShelfWatch, copies_of, places_of


@dataclass(frozen=True, slots=True)
class Ground:
    """What a session stands on once it has recovered.

    threads  the run's thread count, on every machine
    newest   manifests of the newest checkpoints that were stored by then
    """

    run: int
    watch: ShelfWatch
    threads: str
    newest: tuple[Manifest, ...] = ()


def nothing_elsewhere(run: int) -> None:
    """For a run all of whose checkpoints are on the disk."""


def recover(session: Session, rescue: Callable[[int], None] = nothing_elsewhere) -> tuple[Ground, Recovered]:
    """Find the run to go on with, or begin one. Raises CloudrunError when the store cannot be asked.

    ``rescue`` brings to the disk, before it is looked at, what of this run lies elsewhere on this machine.
    """
    run = choose_run(session.local, stored_runs(session.store, session.keys), fresh=session.fresh)
    write_spec(session, run)
    told = list_stored(session.store, session.keys, run)
    stored = tuple(one for one in told if isinstance(one, Checkpoint))
    places = places_of(session, run)
    ours = session.spec.checkpoints.dir is None or claim(session, run, places)
    note = read_trained(session, run)
    rescue(run)
    watch = ShelfWatch(session, places, copies_of(session, run))
    attempt = last_attempt(session, run)
    found = watch.first_look(clean_exit=note is not None)
    # What lay in the owner's folder before its first run may be anything; a pretrained model tells no step.
    here = local_checkpoints([one for one in found if ours or one.step is not None], stored, attempt)
    local = with_epochs(here, read_note(session.local.lease_note), stored)
    epoch = session.lease.epoch_above(max((one.epoch for one in stored), default=0))
    note_epoch(session, epoch, stored, local)
    newest = newest_manifests(session, run, stored)
    return Ground(run, watch, threads_of(newest), newest), Recovered(
        run=run,
        attempt=attempt,
        stored=stored,
        local=local,
        rejected=tuple(Rejected(one.id, one.step, one.reason) for one in told if isinstance(one, Unreadable)),
        done=find(session.store, session.keys.done(run)) is not None,
        trained=note is not None and still_holds(note, (*stored, *local)),
        epoch=epoch,
        history=learned(session, run),
    )


def learned(session: Session, run: int) -> History:
    """What earlier supervisors of the run have learned of machines and of saves. No provider is known as yet."""
    lines = journal_lines(session.store, session.local, run, without=session.id)
    account = reduce(fold, lines, Account())
    return history(account, "") if account.sessions else NO_HISTORY


def check_store(session: Session) -> None:
    """Raise StoreError, before anything is written, when the store lacks a run that this machine knows."""
    if runs_here(session.local):
        choose_run(session.local, stored_runs(session.store, session.keys), fresh=session.fresh)


def choose_run(local: LocalLayout, there: set[int], *, fresh: bool) -> int:
    """The run to go on with; with ``fresh``, or for a job that nobody has started yet, a new one.

    Raises StoreError when a run that this machine knows is not among those ``there``, in the store: one that is not
    mounted looks like an empty one, and must not make the job start from the beginning.
    """
    newest = max(there | runs_here(local), default=0)
    if fresh or not newest:
        return newest + 1
    if newest not in there:
        raise StoreError(
            f"run {newest} of job {local.job}, which this machine has worked on, is not in {local.store_url}",
            "is the store mounted? If the run was deleted on purpose, begin a new one: cloudrun submit --fresh",
        )
    return newest


def runs_here(local: LocalLayout) -> set[int]:
    """The runs of which this disk has records or checkpoints."""
    keys = StoreLayout(local.job)
    folders = [path for root in (local.run_state(1).parent, local.run_cache(1).parent) for path in root.glob("run-*")]
    return {run for path in folders if (run := keys.run_of(f"{keys.prefix()}{path.name}/")) is not None}


def write_spec(session: Session, run: int) -> None:
    """Keep the spec's text in the run, as it is written: with no variable filled in, so with no secret."""
    key, text = session.keys.job_yaml(run), session.secrets.redact(session.spec.raw_text.encode())
    with suppress(ObjectMissing):
        if session.store.read(key) == text:
            return
    session.store.write(key, text)


def claim(session: Session, run: int, places: Places) -> bool:
    """Make a folder of the owner's this run's; whether it was already.

    What another run of the job has left there must not pass for its own.
    """
    root = places.root
    mark, us = root / ".cloudrun-run", {"job": session.local.state.name, "run": run}
    before = read_json(mark)
    if session.fresh or (before.get("job") == us["job"] and before != us):
        old = [found.name for found in scan(places, session.spec.checkpoints.format) if found.verdict.format != "other"]
        set_aside(root, old, root / f".cloudrun-before-run-{run}")
    if before != us:
        write_atomically(mark, json.dumps(us).encode())
    return before == us


def local_checkpoints(found: list[Found], stored: tuple[Checkpoint, ...], attempt: int) -> tuple[Checkpoint, ...]:
    """What this disk has and the store has not, as the last attempt's.

    A name that tells no step counts as the step after the newest.
    """
    known = {one.signature for one in stored}
    newest = max((one.step for one in stored), default=0)
    fresh = [one for one in found if one.signature not in known]
    return tuple(one.as_checkpoint(one.step if one.step is not None else newest + 1, attempt) for one in fresh)


def with_epochs(local: tuple[Checkpoint, ...], note: Note, stored: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """Each as of the epoch in which it was made, as far as this machine remembers.

    One that was put here by hand, where no lease was ever held, is as new as all that is stored.
    """
    made = note.epoch if note.epoch is not None else max((one.epoch for one in stored), default=0)

    def epoch_of(one: Checkpoint) -> int:
        behind = note.epoch is not None and one.step < note.base[1]
        return note.leftovers.get(one.signature, note.base[0] if behind else made)

    return tuple(replace(one, epoch=epoch_of(one)) for one in local)


def note_epoch(session: Session, epoch: int, stored: tuple[Checkpoint, ...], local: tuple[Checkpoint, ...]) -> None:
    """Remember what lies here now, and under which epoch all that follows is made."""
    base = max((place(one) for one in (*stored, *local)), default=(0, -1))
    leftovers = {one.signature: one.epoch for one in local}
    try:
        write_note(session.local.lease_note, Note(session.id, session.host, epoch, base, leftovers))
    except OSError as error:
        session.post(Noticed(f"cannot note under which epoch checkpoints are made here: {error}"))


def still_holds(note: TrainedNote, known: tuple[Checkpoint, ...]) -> bool:
    """The end of training counts while its last checkpoint is there and no other machine has gone on since."""
    if note.signature is None:
        return not known
    last = max((one.epoch for one in known if one.signature == note.signature), default=-1)
    return last >= max((one.epoch for one in known), default=0)


def last_attempt(session: Session, run: int) -> int:
    """The highest attempt number in use, in the store or in records here that have not been stored yet."""
    stored = stored_attempts(session.store, session.keys, run)
    here = [segment.attempt for kind in ("journal", "logs") for segment in local_segments(session.local, run, kind)]
    return max([0, *stored, *here])


def newest_manifests(session: Session, run: int, stored: tuple[Checkpoint, ...]) -> tuple[Manifest, ...]:
    """Of the two newest checkpoints: what follows them may share files with them."""
    found = []
    for one in sorted(stored, key=age, reverse=True)[:2]:
        with suppress(ObjectMissing, CorruptData):
            found.append(read_manifest(session.store, session.keys, run, one.id))
    return tuple(found)


def threads_of(newest: tuple[Manifest, ...]) -> str:
    """The thread count that the run's checkpoints were made with, else this machine's."""
    recorded = newest[0].environment.get(THREADS) if newest else None
    return recorded or threads_of_this_machine()


@dataclass(frozen=True, slots=True)
class TrainedNote:
    """Training has ended; ``signature`` is that of its newest checkpoint."""

    signature: str | None


def note_trained(session: Session, run: int, signature: str | None) -> None:
    write_atomically(session.local.trained, json.dumps({"run": run, "signature": signature}).encode())


def read_trained(session: Session, run: int) -> TrainedNote | None:
    """The note of this run, if there is one. What cannot be read is no note: training again is safe."""
    note = read_json(session.local.trained)
    if note.get("run") != run:
        return None
    signature = note.get("signature")
    return TrainedNote(signature if isinstance(signature, str) else None)


def read_json(path: Path) -> dict[str, Any]:
    """A small file of ours; empty where there is none, or it says nothing."""
    try:
        told = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
