"""Performs actions on worker threads, and posts what came of them. At its edge every error becomes an event."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from runner import __version__
from runner.checkpoint.layout import checkpoint_id
from runner.checkpoint.local import is_unchanged
from runner.checkpoint.manifest import CPU, THREADS, Manifest, to_checkpoint
from runner.checkpoint.stored import remove, sweep
from runner.checkpoint.upload import Facts, upload
from runner.checkpoint.upload_notes import UploadNotes
from runner.core import actions as do
from runner.core import events as on
from runner.core.actions import Action
from runner.core.events import Event
from runner.core.state import Checkpoint
from runner.errors import CloudrunError, CorruptData, DiskFull, ExitCode, ObjectMissing, SourceChanged, StoreError
from runner.files import write_atomically
from runner.launch.environment import Place, command_line, trainer_environment
from runner.launch.inject import with_hook
from runner.supervisor.attempt import Attempt
from runner.supervisor.preparation import Preparation, bring_checkpoint, clear_the_way, empty
from runner.supervisor.recovery import Ground, check_store, note_trained, recover
from runner.supervisor.room import make_room
from runner.supervisor.session import Session
from runner.supervisor.snapshots import Snapshots

WORKERS = 8
SECONDS_TO_END = 10.0


class Executor:
    """The hands of one session. ``perform`` returns at once; orders to the trainer are carried out one by one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="effect")
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="orders")
        self._under_way: set[Future[None]] = set()
        self._preparation = Preparation(session)
        self._ground: Ground | None = None
        self._attempt: Attempt | None = None
        self._snapshots: Snapshots | None = None
        self._uploading: str | None = None
        self._used_ids: set[str] = set()
        self._earlier: tuple[Manifest, ...] = ()
        self._swept = False

    def perform(self, action: Action) -> None:  # noqa: C901, PLR0912 - one arm per action
        match action:
            case do.TakeLease():
                self._submit(self._take_lease, recover_failed)
            case do.WarmUp():
                self._submit(self._warm_up, lambda error: noticed("the data could not be brought here yet", error))
            case do.ReleaseLease():
                self._session.lease.release()
            case do.Recover():
                self._submit(self._recover, recover_failed)
            case do.Prepare(attempt):
                self._submit(lambda: self._prepare(attempt), lambda error: prepare_failed(attempt, error))
            case do.Restore(attempt, checkpoint):
                self._submit(
                    lambda: self._restore(attempt, checkpoint), lambda error: restore_failed(attempt, checkpoint, error)
                )
            case do.StartTrainer(attempt, resume, path):
                self._submit(
                    lambda: self._start(attempt, resume, path), lambda error: not_started(attempt, error), self._orders
                )
            case do.SignalTrainer(attempt, to):
                self._submit(lambda: self._signal(attempt, to), lambda error: noticed("no signal", error), self._orders)
            case do.KillTrainer(attempt):
                self._submit(lambda: self._kill(attempt), lambda error: noticed("not killed", error), self._orders)
            case do.AnnounceStop(attempt, deadline):
                self._submit(lambda: self._announce(attempt, deadline), lambda error: noticed("no stop file", error))
            case do.AskSave():
                self._submit(lambda: self._ask(action), lambda error: noticed("no save asked for", error), self._orders)
            case do.Upload(checkpoint):
                self._submit(lambda: self._upload(checkpoint), lambda error: self._upload_failed(checkpoint, error))
            case do.Prune(verdicts):
                ids = tuple(id_ for id_, _ in verdicts)
                self._submit(lambda: self._prune(ids), lambda error: on.Pruned(ids, words_of(error)))
            case do.NoteTrained(signature):
                self._note_trained(signature)
            case do.MarkDone():
                self._submit(self._mark_done, lambda error: on.DoneNotMarked(words_of(error), is_worth_trying(error)))

    def close(self, patience: float = SECONDS_TO_END) -> None:
        """End what still runs, and wait so long for it. The loop has left: nobody waits for answers any more."""
        self._session.leaving.set()
        for pool in (self._pool, self._orders):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._attempt is not None:
            self._attempt.kill()
            self._attempt.wait(patience)
        if self._snapshots is not None:
            self._snapshots.close()
        self._preparation.close()
        wait([one for one in self._under_way if not one.cancelled()], patience)

    def _submit(
        self,
        work: Callable[[], Event | None],
        failed: Callable[[Exception], Event],
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        def edge() -> None:
            try:
                event = work()
            except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a value
                event = failed(error)
            if event is not None:
                self._session.post(event)

        self._under_way = {one for one in self._under_way if not one.done()} | {(pool or self._pool).submit(edge)}

    # -- what the actions mean -----------------------------------------------------------------------------------------

    def _take_lease(self) -> None:
        check_store(self._session)
        self._session.lease.take()

    def _warm_up(self) -> Event | None:
        self._preparation.warm_up()
        return on.Noticed("the data is here, ready for the takeover") if self._session.sources else None

    def _recover(self) -> Event:
        self._ground, recovered = recover(self._session, self._rescue)
        self._earlier = self._ground.newest
        return recovered

    def _rescue(self, run: int) -> None:
        """Snapshots that an earlier supervisor could not save any more become checkpoints on this disk."""
        if self._snapshots is None:
            self._snapshots = Snapshots(self._session, run, lambda: self._uploading)
        self._snapshots.rescue()

    def _prepare(self, attempt: int) -> Event:
        self._preparation.prepare(self._known_ground, attempt)
        return on.Prepared(attempt)

    def _restore(self, attempt: int, checkpoint: Checkpoint) -> Event:
        make_room(self._session, self._known_ground, checkpoint)
        try:
            path = bring_checkpoint(self._session, self._known_ground, checkpoint)
        except (CorruptData, ObjectMissing):
            # What is damaged there must not be copied into the next one.
            self._earlier = tuple(one for one in self._earlier if one.id != checkpoint.id)
            raise
        return on.Restored(attempt, checkpoint.id, str(path))

    def _start(self, number: int, resume: Checkpoint | None, path: str) -> None:
        session, ground, spec = self._session, self._known_ground, self._session.spec
        place = self._place(number, resume, path)
        # One that is left would end the new trainer at once, as if it had finished.
        place.stop_file.unlink(missing_ok=True)
        empty(place.tmp_dir)
        if resume is None:
            clear_the_way(session, ground, None)
        env = trainer_environment(session.environ, spec.environment(session.environ), place)
        if spec.checkpoints.inject:
            env["PYTHONPATH"] = with_hook(env.get("PYTHONPATH", ""))
        argv = command_line(spec.argv or self._script(ground.run), spec.checkpoints.resume, place)
        self._attempt = Attempt(session, ground.run, number, ground.watch, self._known_snapshots)
        self._attempt.start(argv, env, spec.working_directory)

    def _signal(self, attempt: int, to: do.Recipient) -> None:
        if (running := self._running(attempt)) is not None:
            running.signal(to)

    def _kill(self, attempt: int) -> None:
        if (running := self._running(attempt)) is not None:
            running.kill()

    def _place(self, number: int, resume: Checkpoint | None, path: str) -> Place:
        session, ground = self._session, self._known_ground
        folders = session.folders(ground.run)
        return Place(
            job=session.spec.name,
            store_url=session.local.store_url,
            run=ground.run,
            attempt=number,
            data_dir=self._preparation.data_dir(ground.run),
            checkpoint_dir=folders.checkpoints,
            stop_file=self._stop_file(number),
            tmp_dir=folders.tmp,
            resume_path=path,
            resume_step=resume.step if resume is not None else None,
            threads=ground.threads,
        )

    def _script(self, run: int) -> list[str]:
        path = self._session.local.run_cache(run) / "script.sh"
        write_atomically(path, (self._session.spec.script or "").encode())
        return ["bash", str(path)]

    def _stop_file(self, attempt: int) -> Path:
        """Of one attempt: an announcement that comes late must not stop the next one."""
        return self._session.folders(self._known_ground.run).stop_file.with_name(f"stop-{attempt}")

    def _announce(self, attempt: int, deadline: float) -> None:
        if (running := self._running(attempt)) is not None:
            running.announce(deadline)
        write_atomically(self._stop_file(attempt), f"{deadline:.3f}\n".encode())

    def _ask(self, wanted: do.AskSave) -> None:
        if (running := self._running(wanted.attempt)) is not None:
            running.ask(wanted.reason, wanted.deadline)

    def _upload(self, checkpoint: Checkpoint) -> Event:
        self._uploading = checkpoint.name
        try:
            return self._uploaded(checkpoint)
        finally:
            self._uploading = None

    def _uploaded(self, checkpoint: Checkpoint) -> Event:
        session, ground = self._session, self._known_ground
        found = ground.watch.find(checkpoint)
        if found is None:
            raise SourceChanged(f"{checkpoint.name} was written anew")
        began, told = session.clock.now(), checkpoint.environment
        facts = Facts(
            created_at=began,
            spec_digest=session.spec.digest,
            tool_version=__version__,
            host=session.host,
            epoch=checkpoint.epoch,
            world_size=(told and told.world) or 1,
            environment={THREADS: ground.threads} | ({CPU: told.cpu or ""} if told else {}),
            metrics={name: value for name, value in checkpoint.metrics if math.isfinite(value)},
        )
        notes = UploadNotes(session.local.upload_notes)
        name = notes.id_for(ground.run, found.signature) or self._new_id(checkpoint)
        notes.begin(ground.run, found.signature, name)
        manifest = upload(
            session.store,
            session.keys,
            ground.run,
            name,
            found,
            facts=facts,
            earlier=self._earlier,
            notes=notes,
            stop=session.leaving,
        )
        notes.end()
        ground.watch.stored(checkpoint)
        self._earlier = (manifest, *self._earlier)[:2]
        return on.Uploaded(checkpoint.id, to_checkpoint(manifest), session.clock.now() - began)

    def _new_id(self, checkpoint: Checkpoint) -> str:
        """Named like the attempt's journal and log, so that they are seen to belong together; but never used twice."""
        attempt = max(checkpoint.attempt, 1)
        name = checkpoint_id(checkpoint.step, attempt, self._session.id)
        if name in self._used_ids:
            name = checkpoint_id(checkpoint.step, attempt, secrets.token_hex(3))
        self._used_ids.add(name)
        return name

    def _upload_failed(self, checkpoint: Checkpoint, error: Exception) -> Event:
        """Files that are still what was told are not gone, whatever disturbed their upload: they are tried again."""
        watch = self._known_ground.watch
        here = watch.find(checkpoint)
        gone = isinstance(error, SourceChanged) and (here is None or not is_unchanged(here))
        if gone:
            watch.look_again(checkpoint.attempt)
        return on.UploadFailed(checkpoint.id, words_of(error), is_worth_trying(error), gone)

    def _prune(self, ids: tuple[str, ...]) -> Event:
        session, run = self._session, self._known_ground.run
        remove(session.store, session.keys, run, ids)
        self._sweep(run)
        return on.Pruned(ids)

    def _sweep(self, run: int) -> None:
        """Once per session. Leftovers only cost a little: not to be rid of them is no failure of the prune."""
        if self._swept:
            return
        self._swept = True
        try:
            sweep(self._session.store, self._session.keys, run, self._session.clock.now())
        except StoreError as error:
            self._session.post(on.Noticed(f"leftovers of unfinished uploads could not be removed: {error}"))

    def _note_trained(self, signature: str | None) -> None:
        try:
            note_trained(self._session, self._known_ground.run, signature)
        except OSError as error:
            self._session.post(on.Noticed(f"cannot note that training has ended: {error}"))

    def _mark_done(self) -> Event:
        session, run = self._session, self._known_ground.run
        text = json.dumps({"finished_at": session.clock.now(), "host": session.host}) + "\n"
        session.store.write(session.keys.done(run), text.encode())
        return on.DoneMarked()

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def _known_ground(self) -> Ground:
        assert self._ground is not None, "nothing is ordered before the session has recovered"
        return self._ground

    @property
    def _known_snapshots(self) -> Snapshots:
        assert self._snapshots is not None, "nothing starts before the session has recovered"
        return self._snapshots

    def _running(self, attempt: int) -> Attempt | None:
        here = self._attempt
        return here if here is not None and here.number == attempt else None


# -- errors as values --------------------------------------------------------------------------------------------------


def exit_code_of(error: Exception) -> int:
    return int(error.exit_code) if isinstance(error, CloudrunError) else int(ExitCode.TRAINER_FAILED)


def hint_of(error: Exception) -> str:
    return error.hint if isinstance(error, CloudrunError) else ""


def words_of(error: Exception) -> str:
    """An error of ours speaks for itself; a foreign one is named."""
    return str(error) if isinstance(error, CloudrunError | OSError) else f"{type(error).__name__}: {error}"


def is_worth_trying(error: Exception) -> bool:
    """A full disk may get room again; of our own errors each kind knows; of others nobody can tell."""
    return error.retryable or isinstance(error, DiskFull) if isinstance(error, CloudrunError) else True


def recover_failed(error: Exception) -> Event:
    return on.RecoverFailed(words_of(error), exit_code_of(error), hint_of(error))


def noticed(what: str, error: Exception) -> Event:
    return on.Noticed(f"{what}: {words_of(error)}")


def not_started(attempt: int, error: Exception) -> Event:
    return on.TrainerExited(attempt, 127, not_started=words_of(error))


def prepare_failed(attempt: int, error: Exception) -> Event:
    return on.PrepareFailed(attempt, words_of(error), exit_code_of(error), hint_of(error))


def restore_failed(attempt: int, checkpoint: Checkpoint, error: Exception) -> Event:
    if isinstance(error, CorruptData | ObjectMissing):
        return on.CheckpointRejected(attempt, checkpoint.id, words_of(error))
    return prepare_failed(attempt, error)
