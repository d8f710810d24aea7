"""From a job spec to live objects: the only module that knows the concrete classes together."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner import __version__
from runner.checkpoint.layout import LocalLayout, StoreLayout, state_dir
from runner.clock import Clock, SystemClock
from runner.core.events import Event, Started, StoreStruggled
from runner.core.policy import Keep, Policy
from runner.core.record import Entry
from runner.core.state import Ending
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.dataset.sync import SyncProgress
from runner.errors import CloudrunError, NotYetError, UsageError
from runner.files import locked, write_atomically
from runner.monitors.files import StopRequests
from runner.spec import Data, JobSpec, usual_cache_dir
from runner.storage.api import ObjectStore
from runner.storage.folder import FolderStore
from runner.storage.retrying import Retry, RetryingStore
from runner.supervisor.inbox import Inbox
from runner.supervisor.life import live
from runner.supervisor.output import Console, Secrets
from runner.supervisor.session import Session
from runner.supervisor.trainer import OrphanReaper

AUTO_UPLOAD_EVERY = 300.0
STORE_PATIENCE = 60.0
# Commands that ask whether a job runs hold its lock for a moment.
SECONDS_OF_A_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job as this machine sees it: its spec, its store, its places."""

    spec: JobSpec
    environ: Mapping[str, str]
    store: ObjectStore
    local: LocalLayout

    @property
    def keys(self) -> StoreLayout:
        return StoreLayout(self.spec.name)


def open_job(spec: JobSpec, environ: Mapping[str, str]) -> Job:
    url = spec.store_url(environ)
    local = LocalLayout(state_dir(environ), spec.cache_dir(environ), spec.name, url)
    return Job(spec, environ, open_store(url), local)


def open_store(url: str) -> ObjectStore:
    """The store behind a URL. Raises NotYetError for a kind that this version has not."""
    scheme, _, rest = url.partition("://")
    if scheme != "file":
        raise NotYetError(f"{scheme}:// is not in this version yet", "use a folder: file:///path")
    return FolderStore(Path(rest))


def open_cache(spec: JobSpec, environ: Mapping[str, str]) -> DataCache:
    folder, limit = spec.cache_dir(environ), spec.cache.limit
    return DataCache(folder, limit if isinstance(limit, int) else share_of_disk(folder, limit))


def open_cache_of_user(environ: Mapping[str, str]) -> DataCache:
    """The cache of jobs whose spec names none."""
    return DataCache(usual_cache_dir(environ))


def share_of_disk(folder: Path, share: float) -> int:
    """Bytes: a share of the file system on which ``folder`` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return int(disk.f_blocks * disk.f_frsize * share)


def open_source(data: Data) -> Source:
    """A dataset's source. A folder is a prefix, a file is one object."""
    scheme, _, rest = data.source.partition("://")
    if scheme != "file":
        raise NotYetError(f"{scheme}:// is not in this version yet", "use a folder: file:///path")
    path = Path(rest)
    root, prefix = (path, "") if path.is_dir() else (path.parent, path.name)
    return Source(
        url=data.source,
        store=FolderStore(root),
        prefix=prefix,
        include=data.include,
        exclude=data.exclude,
        verify=data.verify,
        extract=data.extract,
    )


def make_policy(spec: JobSpec) -> Policy:
    keep, restart = spec.checkpoints.keep, spec.restart
    every = spec.checkpoints.every
    return Policy(
        upload_every=AUTO_UPLOAD_EVERY if isinstance(every, str) else every,
        give_up_storing=spec.storage.for_scheme("file").give_up,
        grace=spec.stop.grace,
        max_without_progress=restart.max_without_progress,
        backoff_first=restart.backoff.first,
        backoff_limit=restart.backoff.limit,
        on_exit=tuple(restart.on_exit.items()),
        keep=Keep(
            last=keep.last,
            every_steps=keep.every if isinstance(keep.every, int) else None,
            every_seconds=keep.every if isinstance(keep.every, float) else None,
        ),
    )


class Orphans:
    """As PID 1, or for daemons of a killed guard: what nobody waits for is reaped."""

    name = "orphans"
    # A look costs some microseconds for each process of the machine, of which there may be thousands.
    every = 30.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reaper = OrphanReaper()

    def poll(self) -> Iterable[Event]:
        self._reaper.reap(self._clock.now())
        return ()


def run_job(
    job: Job,
    inbox: Inbox,
    *,
    fresh: bool,
    terminal: Console | None,
    progress: Callable[[SyncProgress], None],
    tell: Callable[[Entry], None],
) -> Ending:
    """Run a job on this machine until it is done or this machine is. Raises UsageError when it runs here already."""
    clock = SystemClock()
    leaving = threading.Event()

    def struggled(operation: str, error: CloudrunError, wait: float) -> None:
        inbox.post(StoreStruggled(operation, str(error), wait))

    session = Session(
        id=secrets.token_hex(3),
        spec=job.spec,
        store=RetryingStore(job.store, Retry(STORE_PATIENCE, on_retry=struggled, stop=leaving)),
        keys=job.keys,
        local=job.local,
        cache=open_cache(job.spec, job.environ),
        sources=tuple((data.target, open_source(data)) for data in job.spec.data),
        environ=job.environ,
        host=socket.gethostname(),
        fresh=fresh,
        post=inbox.post,
        terminal=terminal,
        progress=progress,
        secrets=Secrets(job.spec.secret_values(job.environ)),
        clock=clock,
        leaving=leaving,
    )
    with alone(job, session):
        monitors = (StopRequests(job.local.stop_request), Orphans(clock))
        return live(session, make_policy(job.spec), inbox, started(session, monitors), monitors, tell)


def started(session: Session, monitors: tuple[StopRequests, Orphans]) -> Started:
    price = session.spec.price
    return Started(
        host=session.host,
        version=__version__,
        per_hour=price.per_hour,
        on_demand_per_hour=price.on_demand_per_hour,
        currency=price.currency,
        monitors=tuple(monitor.name for monitor in monitors),
    )


@contextmanager
def alone(job: Job, session: Session) -> Iterator[None]:
    """Be this machine's only supervisor of the job, and say who we are."""
    with ExitStack() as held:
        if not take(job.local.lock, held, session.clock):
            who = read_supervisor(job.local).get("pid", "unknown")
            raise UsageError(
                f"job {job.spec.name} is running on this machine already (process {who})",
                f"look at it with: cloudrun status {job.spec.name}; stop it with: cloudrun stop {job.spec.name}",
            )
        job.local.stop_request.unlink(missing_ok=True)
        write_atomically(job.local.supervisor, json.dumps(describe(job, session)).encode())
        yield


def take(lock: Path, held: ExitStack, clock: Clock) -> bool:
    """Hold the lock as long as ``held`` lasts. False when somebody keeps it, longer than a look at it takes."""
    give_up = clock.now() + SECONDS_OF_A_LOOK
    while True:
        try:
            held.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            if clock.now() >= give_up:
                return False
            time.sleep(SECONDS_OF_A_LOOK / 20)
        else:
            return True


def describe(job: Job, session: Session) -> dict[str, Any]:
    """How other commands find this job by its name."""
    return {
        "job": job.spec.name,
        "pid": os.getpid(),
        "session": session.id,
        "started_at": session.clock.now(),
        "spec": str(job.spec.source),
        "store": job.local.store_url,
        "cache": str(job.local.cache_dir),
        "keep": asdict(make_policy(job.spec).keep),
    }


def read_supervisor(local: LocalLayout) -> dict[str, Any]:
    """What the newest supervisor of a job on this machine said of itself; empty when there was none."""
    try:
        told = json.loads(local.supervisor.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
