"""sync and cache: datasets on this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import click

from runner.cli.main import HELP, complain
from runner.cli.progress import SyncReport
from runner.cli.questions import confirm
from runner.dataset.cache import CacheEntry, DataCache
from runner.dataset.fetch import SyncStopped
from runner.dataset.sync import Dataset
from runner.errors import ExitCode, UsageError
from runner.spec import JobSpec, SpecInvalid, load_spec, not_yet
from runner.storage.retrying import Retry
from runner.units import format_size
from runner.wiring.places import STORE_PATIENCE, open_cache, open_cache_of_user, open_source


@click.command(context_settings=HELP, epilog="Example: cloudrun sync job.yaml")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a field of the spec.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of the datasets.")
def sync(spec: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Bring the data of the job SPEC into this machine's cache, nothing else. What is there already is not fetched."""
    loaded = load_spec(spec, overrides=overrides, environ=os.environ)
    problems = [problem for problem in not_yet(loaded) if problem.key.startswith("data")]
    if problems:
        raise SpecInvalid(problems)
    stop = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        rows = sync_all(loaded, stop)
    except SyncStopped as stopped:
        complain(stopped.message, stopped.hint)
        return ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    if as_json:
        click.echo(json.dumps(rows))
    elif not rows:
        click.echo(f"job {loaded.name} has no data", err=True)
    for row in rows if not as_json else ():
        click.echo(row["path"])
    return ExitCode.SUCCEEDED


def sync_all(spec: JobSpec, stop: threading.Event) -> list[dict[str, object]]:
    cache = open_cache(spec, os.environ)
    rows = []
    with SyncReport(lambda text: click.echo(text, err=True)) as report:
        retry = Retry(STORE_PATIENCE, on_retry=report.retrying, stop=stop)
        for data in spec.data:
            dataset = cache.sync(open_source(spec, data, os.environ, retry), report=report, stop=stop)
            rows.append(dataset_row(data.source, dataset))
    return rows


def dataset_row(source: str, dataset: Dataset) -> dict[str, object]:
    """``left_out`` names the first few of the objects that cannot be files here."""
    return {
        "source": source,
        "path": str(dataset.path),
        "files": dataset.files,
        "bytes": dataset.bytes,
        "fetched_files": dataset.fetched_files,
        "fetched_bytes": dataset.fetched_bytes,
        "seconds": dataset.seconds,
        "left_out": {
            "count": dataset.left_out.count,
            "first": [{"key": odd.key, "reason": odd.reason} for odd in dataset.left_out.named],
        },
    }


@click.group(context_settings=HELP, epilog="Example: cloudrun cache ls")
def cache() -> None:
    """List or clear the local data cache."""


spec_option = click.option("--spec", type=click.Path(path_type=Path), help="The cache that this job spec names.")


@cache.command("ls", context_settings=HELP, epilog="Example: cloudrun cache ls --json")
@spec_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(spec: Path | None, as_json: bool) -> None:
    """List what the cache holds."""
    entries = cache_of(spec).entries()
    if as_json:
        click.echo(json.dumps([as_row(entry) for entry in entries]))
        return
    if not entries:
        click.echo("the cache is empty", err=True)
    for entry in entries:
        state = "in use" if entry.in_use else "complete" if entry.complete else "incomplete"
        name = entry.source or entry.path.name
        click.echo(f"{format_size(entry.bytes):>10}  {entry.files:>7} file(s)  {state:<10}  {name}")


def as_row(entry: CacheEntry) -> dict[str, object]:
    return {
        "source": entry.source,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "files": entry.files,
        "complete": entry.complete,
        "in_use": entry.in_use,
        "last_used": entry.last_used,
    }


@cache.command("clear", context_settings=HELP, epilog="Example: cloudrun cache clear s3://bucket/digits --yes")
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@click.option("--all", "everything", is_flag=True, help="All of it.")
@spec_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(sources: tuple[str, ...], everything: bool, spec: Path | None, yes: bool) -> None:
    """Delete datasets from the cache, by their SOURCE. What a running job uses stays. The originals are not touched."""
    if bool(sources) == everything:
        raise UsageError("say which datasets go", "name their sources as cloudrun cache ls shows them, or use --all")
    if not yes:
        confirm(f"delete {', '.join(sources) or 'everything'} from the cache?")
    cleared = cache_of(spec).clear(sources or None)
    for entry in cleared.removed:
        click.echo(f"{entry.source}: {format_size(entry.bytes)} freed")
    for entry in cleared.in_use:
        click.echo(f"{entry.source}: in use, kept", err=True)


def cache_of(spec: Path | None) -> DataCache:
    if spec is None:
        return open_cache_of_user(os.environ)
    return open_cache(load_spec(spec, environ=os.environ), os.environ)
