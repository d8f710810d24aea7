"""status and logs: what a job does, and what its trainer says. Both also work after the machine has gone."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from runner.checkpoint.layout import Segment
from runner.cli.jobs import KnownJob, find_job, from_record, known_here
from runner.cli.main import HELP
from runner.core.ledger import Account, fold
from runner.core.ledger import status as status_of
from runner.errors import CloudrunError, UsageError
from runner.report.retries import Retries, describe, tally
from runner.report.status import render, summary
from runner.storage.api import ObjectStore
from runner.supervisor.history import journal_lines, local_segments, order, segment_bytes, stored_segments
from runner.supervisor.lease_body import Body, read_body
from runner.wiring.supervision import read_supervisor

WATCH_EVERY = 2.0
FOLLOW_EVERY = 0.5
FOLLOW_STORE_EVERY = 5.0


@click.command(context_settings=HELP, epilog="Example: cloudrun status digits --watch")
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; without JOB a list of them.")
@click.option("--watch", is_flag=True, help="Show it again every 2 seconds, until the job ends.")
def status(job: str | None, as_json: bool, watch: bool) -> None:
    """Show where JOB stands: phase, step, the newest stored checkpoint, the work at risk, and why it last stopped.

    JOB is a name or the path of a spec. Without one, all jobs that have run on this machine are listed.
    """
    if job is None:
        list_jobs(as_json=as_json)
        return
    known = find_job(job, os.environ)
    while True:
        now = time.time()
        told = where_it_stands(known, now)
        show(told, now, as_json=as_json, clear=watch and sys.stdout.isatty())
        if not watch or told["alive"] is False or told["phase"] == "finished":
            return
        time.sleep(WATCH_EVERY)


def where_it_stands(known: KnownJob, now: float) -> dict[str, Any]:
    """The status; of a supervisor on another machine nobody here can tell whether it lives."""
    account, retries = read_journal(known)
    here = read_supervisor(known.local).get("session") if known.is_alive() else None
    speaks = bool(account.sessions) and account.sessions[-1].id == here
    told = status_of(known.name, account, now, alive=speaks) | {"retries": describe(retries)}
    if not told["alive"] and told["host"] != socket.gethostname():
        told["alive"] = None
    lease = known.ask(lambda store: read_body(store, known.keys.lease()) if store else None, enough=True)
    told["lease"] = describe_lease(lease) if lease else told["lease"]
    return told if here is None or speaks else told | standing_by(told["lease"], here)


def read_journal(known: KnownJob) -> tuple[Account, Retries]:
    """What all lines of the newest run amount to, from here and from the store."""
    run = known.newest_run()

    def read(store: ObjectStore | None) -> tuple[Account, Retries]:
        account, retries = Account(), Retries()
        for line in journal_lines(store, known.local, run):
            account, retries = fold(account, line), tally(retries, line)
        return account, retries

    return known.ask(read, enough=bool(local_segments(known.local, run, "journal")))


def describe_lease(lease: Body) -> dict[str, Any] | None:
    """None while nobody holds it."""
    if lease.released:
        return None
    hosts = sorted(one.host for one in lease.standby)
    return {"holder": lease.holder, "host": lease.host, "epoch": lease.epoch, "standby": hosts}


def standing_by(lease: dict[str, Any] | None, here: str) -> dict[str, Any]:
    """What differs while the supervisor of this machine waits for another one, or has only just begun."""
    other = lease is not None and lease["holder"] != here
    reason = f"{lease['host']} runs this job" if lease and other else None
    return {"phase": "waiting", "alive": True, "outcome": None, "exit_code": None, "reason": reason}


def show(told: dict[str, Any], now: float, *, as_json: bool, clear: bool) -> None:
    if as_json:
        click.echo(json.dumps(told))
        return
    if clear:
        click.clear()
    click.echo(render(told, now))


def list_jobs(*, as_json: bool) -> None:
    """One line for each job of this machine."""
    known = [from_record(told, os.environ) for told in known_here(os.environ)]
    if as_json:
        click.echo(json.dumps([or_why_not(one) for one in known]))
        return
    if not known:
        click.echo("no job has run on this machine", err=True)
    for one in known:
        click.echo(one_line(one))


def or_why_not(known: KnownJob) -> dict[str, Any]:
    """The status of a job, or what stands in the way of telling it."""
    try:
        return where_it_stands(known, time.time())
    except CloudrunError as error:
        return {"job": known.name, "error": error.message}


def one_line(known: KnownJob) -> str:
    told = or_why_not(known)
    return f"{known.name}: {told['error']}" if "error" in told else summary(told, time.time())


@click.command(context_settings=HELP, epilog="Example: cloudrun logs -f digits")
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on as the trainer prints, until the job ends.")
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt; default: of the newest.")
@click.option("--all", "everything", is_flag=True, help="Of all attempts, one after the other.")
def logs(job: str, follow: bool, attempt: int | None, everything: bool) -> None:
    """Show what the trainer of JOB printed, from this machine or from the store."""
    if everything and attempt is not None:
        raise UsageError("--all and --attempt exclude each other", "leave one of them out")
    known = find_job(job, os.environ)
    reader = LogReader(known, known.newest_run())
    first = reader.attempts()
    if not first and not follow:
        raise UsageError(f"job {known.name} has no logs yet", f"follow them as they come: cloudrun logs -f {job}")
    if attempt is not None and attempt not in first:
        raise UsageError(f"job {known.name} has no attempt {attempt}", f"there are: {', '.join(map(str, first))}")
    least = attempt if attempt is not None else 0 if everything else max(first, default=0)
    most = attempt if attempt is not None else None
    out = sys.stdout.buffer
    for data in reader.follow(least, most) if follow else reader.new(least, most):
        out.write(data)
        out.flush()


class LogReader:
    """The log segments of a run, from the disk where they are there and else from the store; each byte once."""

    def __init__(self, known: KnownJob, run: int) -> None:
        self._known = known
        self._run = run
        self._shown: dict[Segment, int] = {}

    def attempts(self) -> list[int]:
        return sorted({segment.attempt for segment in self._segments()[2]})

    def new(self, least: int, most: int | None = None) -> Iterator[bytes]:
        """What was not shown yet, of the attempts between ``least`` and ``most``."""
        here, there, segments = self._segments()
        for segment in segments:
            if segment.attempt < least or (most is not None and segment.attempt > most):
                continue
            size = here[segment].stat().st_size if segment in here else there[segment][1]
            if size > self._shown.get(segment, 0):
                data = segment_bytes(self._known.store, here, there, segment)
                yield data[self._shown.get(segment, 0) :]
                self._shown[segment] = len(data)

    def follow(self, least: int, most: int | None) -> Iterator[bytes]:
        """The same, until the job's supervisor has gone; one on another machine is followed through the store."""
        while True:
            here = self._known.is_alive()
            ended = not here and self._has_ended()
            yield from self.new(least, most)
            if ended:
                return
            time.sleep(FOLLOW_EVERY if here else FOLLOW_STORE_EVERY)

    def _has_ended(self) -> bool:
        """Asked when no supervisor lives here."""
        account = self._known.account()
        ran_here = bool(account.sessions) and account.sessions[-1].host == socket.gethostname()
        return ran_here or account.state.get("phase") == "finished"

    def _segments(self) -> tuple[dict[Segment, Path], dict[Segment, tuple[str, int]], list[Segment]]:
        here = local_segments(self._known.local, self._run, "logs")
        there = self._known.ask(self._stored, enough=bool(here))
        return here, there, sorted({*here, *there}, key=order)

    def _stored(self, store: ObjectStore | None) -> dict[Segment, tuple[str, int]]:
        return stored_segments(store, self._known.keys, self._run, "logs") if store else {}
