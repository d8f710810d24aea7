"""submit and stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runner.cli.main import HELP
from runner.errors import ExitCode, UsageError
from runner.supervisor.inbox import Inbox
from runner.supervisor.signals import signals_posted

if TYPE_CHECKING:
    from runner.cli.submission import Submission

SECONDS_TO_DETACH = 20.0


@click.command(
    context_settings=HELP,
    epilog="Example: cloudrun submit job.yaml --set checkpoints.every=10m",
)
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field of the spec.")
@click.option("--detach", is_flag=True, help="Go on in the background; come back when the job has started.")
@click.option("--fresh", is_flag=True, help="Begin a new run, from the first step; older runs stay in the store.")
@click.option("--standby", is_flag=True, help="Begin nothing: follow another machine that has begun the job.")
@click.option("--dry-run", is_flag=True, help="Say what would happen, and do nothing.")
@click.option("--quiet", is_flag=True, help="Do not show what the trainer prints; it is in the logs.")
def submit(
    spec: Path,
    overrides: tuple[str, ...],
    *,
    detach: bool,
    fresh: bool,
    standby: bool,
    dry_run: bool,
    quiet: bool,
) -> int:
    """Run the job SPEC on this machine until it is done, or this machine is.

    Start it again with the same command, here or on the next machine: it goes on from the newest checkpoint. While
    another machine runs the job this one stands by: it brings the data here, and takes over within seconds when the
    other one leaves without having finished, and within half a minute when it dies.

    Exit codes: 0 done; 75 asked to leave, run the same command again; 70 the trainer failed for good; 73 the last
    checkpoint could not be stored, run the same command again here.
    """
    if fresh and standby:
        raise UsageError("--fresh and --standby exclude each other", "begin the new run on the machine that goes first")
    if dry_run:
        return plan(spec, overrides, fresh=fresh)
    if detach:
        return start_in_background(spec, overrides, fresh=fresh, standby=standby)
    inbox = Inbox()
    # From here on a SIGTERM is a request to leave, also while the rest is still being loaded.
    with signals_posted(inbox.post):
        return load(spec, overrides).run(inbox, fresh=fresh, standby=standby, quiet=quiet)


def load(spec: Path, overrides: tuple[str, ...]) -> Submission:
    from runner.cli.submission import Submission  # noqa: PLC0415 - heavy, and signals must not wait for it

    return Submission.load(spec, overrides, dict(os.environ))


def plan(spec: Path, overrides: tuple[str, ...], *, fresh: bool) -> int:
    for line in load(spec, overrides).plan(fresh=fresh):
        click.echo(line)
    return ExitCode.SUCCEEDED


def start_in_background(spec: Path, overrides: tuple[str, ...], *, fresh: bool, standby: bool) -> int:
    """Start the same command in a session of its own, and wait until it holds the job or has ended."""
    submission = load(spec, overrides)
    local = submission.job.local
    if submission.is_running():
        raise UsageError(f"job {submission.job.spec.name} is running on this machine already")
    local.state.mkdir(parents=True, exist_ok=True)
    # -P: a folder called runner, here, is not ours.
    command = [sys.executable, "-P", "-m", "runner", "submit", str(spec), "--quiet"]
    command += [word for override in overrides for word in ("--set", override)]
    command += ["--fresh"] * fresh + ["--standby"] * standby
    with local.console.open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    give_up = time.monotonic() + SECONDS_TO_DETACH
    while time.monotonic() < give_up and child.poll() is None and submission.supervisor_pid() != child.pid:
        time.sleep(0.05)
    name = submission.job.spec.name
    if (code := child.poll()) is not None:
        click.echo(local.console.read_text(errors="replace"), err=True, nl=False)
        return code if code >= 0 else ExitCode.TRAINER_FAILED
    click.echo(f"{name} runs in the background (process {child.pid})")
    click.echo(f"look at it: cloudrun status {name}; its output: cloudrun logs -f {name}; end it: cloudrun stop {name}")
    return ExitCode.SUCCEEDED


@click.command(context_settings=HELP, epilog="Example: cloudrun stop digits")
@click.argument("job")
@click.option("--now", is_flag=True, help="Do not wait for a save.")
@click.option(
    "--timeout", type=float, default=None, metavar="SECONDS", help="Wait so long for the end; default: for ever."
)
def stop(job: str, now: bool, timeout: float | None) -> int:
    """Ask JOB, which runs on this machine, to save, upload and leave.

    JOB is a name or the path of a spec. A second stop shortens the wait.
    """
    from runner.cli.jobs import find_job  # noqa: PLC0415 - heavy
    from runner.monitors.files import request_stop  # noqa: PLC0415

    known = find_job(job, os.environ)
    if not known.is_alive():
        raise UsageError(f"job {known.name} is not running on this machine", "see where it stands: cloudrun status")
    request_stop(known.local.stop_request, now=now)
    began = time.monotonic()
    told = 0.0
    while known.is_alive():
        waited = time.monotonic() - began
        if timeout is not None and waited >= timeout:
            raise UsageError(f"job {known.name} is still leaving after {timeout:g} s", "cloudrun stop --now is harder")
        if waited - told >= 10:
            told = waited
            click.echo(f"waiting for {known.name} to save and upload ({waited:.0f} s)", err=True)
        time.sleep(0.1)
    click.echo(f"{known.name} has stopped; cloudrun submit goes on with it")
    return ExitCode.SUCCEEDED
