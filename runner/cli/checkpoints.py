"""checkpoints: what is stored, whether it is whole, and how to get it or get rid of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import click

from runner.checkpoint.restore import pull, verify
from runner.checkpoint.stored import Unreadable, list_stored, remove
from runner.cli.jobs import KnownJob, find_job
from runner.cli.main import HELP
from runner.cli.questions import confirm
from runner.core.retention import retain
from runner.core.state import Checkpoint
from runner.errors import CorruptData, ExitCode, UsageError
from runner.units import format_size

WHEN = "%Y-%m-%d %H:%M:%S"


@click.group(
    context_settings=HELP,
    epilog="Example: cloudrun checkpoints pull digits --to weights",
)
def checkpoints() -> None:
    """List, verify, pull or remove the stored checkpoints of a job (of its newest run)."""


@checkpoints.command("ls", context_settings=HELP, epilog="Example: cloudrun checkpoints ls digits --json")
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(job: str, as_json: bool) -> None:
    """List the stored checkpoints of JOB, newest first."""
    known = find_job(job, os.environ)
    run = known.newest_run()
    told = list_stored(known.store, known.keys, run)
    rows = describe(known, run, told)
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not told:
        click.echo(f"job {known.name} has no stored checkpoint", err=True)
    for row in rows:
        click.echo(f"{row['id']}  {format_size(row['bytes']):>10}  {row['files']:>4} file(s)  {row['kept_because']}")
    for one in told:
        if isinstance(one, Unreadable):
            click.echo(f"{one.id}  unusable: {one.reason}", err=True)


def describe(known: KnownJob, run: int, told: list[Checkpoint | Unreadable]) -> list[dict[str, Any]]:
    stored = tuple(one for one in told if isinstance(one, Checkpoint))
    keep = known.keep
    verdicts = retain(
        stored,
        rejected=frozenset(),
        in_use=None,
        last=keep.last,
        every_steps=keep.every_steps,
        every_seconds=keep.every_seconds,
        best=keep.best,
    )
    reasons = {one.id: one.reason for one in verdicts}
    return [
        {
            "id": one.id,
            "step": one.step,
            "attempt": one.attempt,
            "run": run,
            "path": f"{known.store.url}/{known.keys.checkpoint_prefix(run, one.id)}",
            "files": one.files,
            "bytes": one.bytes,
            "committed_at": one.time,
            "kept_because": reasons[one.id],
        }
        for one in stored
    ]


@checkpoints.command("verify", context_settings=HELP, epilog="Example: cloudrun checkpoints verify digits --step 1200")
@click.argument("job")
@click.option("--step", type=int, help="Only the checkpoint of this step.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def verify_(job: str, step: int | None, as_json: bool) -> int:
    """Read every byte of JOB's checkpoints and compare it with its digest. Exits with 70 when one is bad."""
    known = find_job(job, os.environ)
    run = known.newest_run()
    results = []
    for one in chosen(known, run, step):
        problems = [one.reason] if isinstance(one, Unreadable) else verify(known.store, known.keys, run, one)
        results.append({"id": one.id, "step": one.step, "problems": problems})
        if not as_json:
            click.echo(f"{one.id}  {'good' if not problems else '; '.join(problems)}")
    if as_json:
        click.echo(json.dumps(results))
    return ExitCode.TRAINER_FAILED if any(result["problems"] for result in results) else ExitCode.SUCCEEDED


@checkpoints.command("pull", context_settings=HELP, epilog="Example: cloudrun checkpoints pull digits --to weights")
@click.argument("job")
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option("--step", type=int, help="The checkpoint of this step; default: the newest that is whole.")
def pull_(job: str, folder: Path, step: int | None) -> None:
    """Bring a verified copy of a checkpoint of JOB to a folder, and print its path."""
    known = find_job(job, os.environ)
    run = known.newest_run()
    for one in chosen(known, run, step):
        if isinstance(one, Unreadable):
            click.echo(f"{one.id} is not whole: {one.reason}", err=True)
            continue
        try:
            click.echo(pull(known.store, known.keys, run, one, folder.absolute(), stop=threading.Event()))
            return
        except CorruptData as error:
            click.echo(f"{one.id} is not whole: {error.message}", err=True)
    raise CorruptData(
        f"job {known.name} has no whole checkpoint to pull", f"look at them: cloudrun checkpoints verify {known.name}"
    )


@checkpoints.command("rm", context_settings=HELP, epilog="Example: cloudrun checkpoints rm digits --step 1200")
@click.argument("job")
@click.option("--step", type=int, required=True, help="The step whose checkpoint goes.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(job: str, step: int, yes: bool) -> None:
    """Delete the checkpoint of one step of JOB from the store."""
    known = find_job(job, os.environ)
    run = known.newest_run()
    going = [one.id for one in chosen(known, run, step)]
    if not yes:
        confirm(f"delete {', '.join(going)} from {known.store.url} for good?")
    remove(known.store, known.keys, run, going)
    for id_ in going:
        click.echo(f"deleted {id_}")


def chosen(known: KnownJob, run: int, step: int | None) -> list[Checkpoint | Unreadable]:
    """The stored checkpoints, or those of one step. Raises UsageError when there is none."""
    told = list_stored(known.store, known.keys, run)
    picked = [one for one in told if step is None or one.step == step]
    if not picked and told:
        steps = ", ".join(dict.fromkeys(str(one.step) for one in told))
        raise UsageError(f"job {known.name} has no checkpoint of step {step}", f"there are: {steps}")
    if not picked:
        raise UsageError(f"job {known.name} has no stored checkpoint", "see what it does: cloudrun status")
    return picked
