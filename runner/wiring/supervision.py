"""From a job spec to a supervisor at work."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runner import __version__
from runner.checkpoint.layout import LocalLayout
from runner.clock import Clock, SystemClock
from runner.core.events import Event, Started, StoreStruggled
from runner.core.policy import Best, Keep, Policy
from runner.core.record import Entry
from runner.core.state import Ending
from runner.dataset.sync import SyncProgress
from runner.errors import CloudrunError, UsageError
from runner.files import locked, write_atomically
from runner.monitors.files import StopRequests
from runner.spec import JobSpec
from runner.storage.access import CREDENTIALS
from runner.storage.retrying import Retry
from runner.supervisor.fence import FencedStore
from runner.supervisor.inbox import Inbox
from runner.supervisor.lease import LeaseKeeper, LeasePlace
from runner.supervisor.lease_body import PERIOD as LEASE_PERIOD
from runner.supervisor.lease_body import Waiter
from runner.supervisor.life import live
from runner.supervisor.output import Console, Secrets
from runner.supervisor.session import Session
from runner.supervisor.trainer import OrphanReaper
from runner.wiring.places import STORE_PATIENCE, Job, open_cache, open_source

# Share of a lease's period that one question about it, or one write under it, may take.
QUICK = 0.125
# Commands that ask whether a job runs hold its lock for a moment.
SECONDS_OF_A_LOOK = 1.0


def make_policy(spec: JobSpec) -> Policy:
    keep, restart = spec.checkpoints.keep, spec.restart
    every = spec.checkpoints.every
    return Policy(
        upload_every=None if isinstance(every, str) else every,
        give_up_storing=spec.storage.give_up,
        grace=spec.stop.grace,
        max_without_progress=restart.max_without_progress,
        backoff_first=restart.backoff.first,
        backoff_limit=restart.backoff.limit,
        on_exit=tuple(restart.on_exit.items()),
        keep=Keep(
            last=keep.last,
            every_steps=keep.every if isinstance(keep.every, int) else None,
            every_seconds=keep.every if isinstance(keep.every, float) else None,
            best=best_of(keep.best),
        ),
    )


def best_of(told: str | None) -> Best | None:
    """From the spec's words: ``min`` or ``max``, and the metric."""
    if told is None:
        return None
    mode, _, metric = told.partition(" ")
    return Best(metric, "max" if mode == "max" else "min")


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
    standby: bool = False,
    terminal: Console | None,
    progress: Callable[[SyncProgress], None],
    tell: Callable[[Entry], None],
    lease_period: float = LEASE_PERIOD,
) -> Ending:
    """Run a job on this machine until it is done or this machine is. Raises UsageError when it runs here already.

    With ``standby``, only after another machine has begun it. ``lease_period`` is in seconds.
    """
    clock = SystemClock()
    leaving = threading.Event()

    def struggled(operation: str, error: CloudrunError, wait: float) -> None:
        inbox.post(StoreStruggled(operation, str(error), wait))

    retry = Retry(STORE_PATIENCE, on_retry=struggled, stop=leaving)
    me = Waiter(secrets.token_hex(3), socket.gethostname())
    quick = job.opening(Retry(lease_period * QUICK, stop=leaving))
    lease = LeaseKeeper(
        LeasePlace(quick, job.keys.lease(), me, lease_period),
        job.local.lease_note,
        post=inbox.post,
        clock=clock,
        first=retry,
        may_begin=not standby,
    )
    session = Session(
        id=me.id,
        spec=job.spec,
        store=FencedStore(job.opening(retry), quick, lease, retry),
        lease=lease,
        keys=job.keys,
        local=job.local,
        cache=open_cache(job.spec, job.environ),
        sources=tuple((data.target, open_source(job.spec, data, job.environ, retry)) for data in job.spec.data),
        environ=job.environ,
        host=me.host,
        fresh=fresh,
        post=inbox.post,
        terminal=terminal,
        progress=progress,
        secrets=Secrets((*job.spec.secret_values(job.environ), *credentials_in(job.environ))),
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
        session=session.id,
        version=__version__,
        per_hour=price.per_hour,
        on_demand_per_hour=price.on_demand_per_hour,
        currency=price.currency,
        monitors=tuple(monitor.name for monitor in monitors),
    )


def credentials_in(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What opens the store, as far as the environment holds it: masked like a secret wherever we write."""
    return tuple(value for name in CREDENTIALS if (value := environ.get(name)))


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
        "access": asdict(replace(job.opening.access, environ={})),
    }


def read_supervisor(local: LocalLayout) -> dict[str, Any]:
    """What the newest supervisor of a job on this machine said of itself; empty when there was none."""
    try:
        told = json.loads(local.supervisor.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
