"""JOB on the command line: a name or a spec's path; here is how it is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from runner.checkpoint.layout import LocalLayout, StoreLayout, state_dir
from runner.core.ledger import Account, fold
from runner.core.policy import Best, Keep
from runner.errors import StoreError, UsageError
from runner.files import is_locked
from runner.spec import SpecInvalid, load_spec
from runner.storage.api import ObjectStore
from runner.supervisor.history import journal_lines, local_segments, stored_runs
from runner.supervisor.recovery import runs_here
from runner.wiring.places import open_job, open_recorded
from runner.wiring.supervision import make_policy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job that people ask about: where it lives, here and in its store, and what its owner wants to keep.

    silent    why the store could not be asked, once it could not: it is not waited for again
    """

    name: str
    store: ObjectStore
    local: LocalLayout
    keep: Keep
    silent: list[StoreError] = field(default_factory=list)

    @property
    def keys(self) -> StoreLayout:
        return StoreLayout(self.name)

    def is_alive(self) -> bool:
        """True while a supervisor of this machine runs it."""
        return is_locked(self.local.lock)

    def newest_run(self) -> int:
        """The run that is current, by the store and by this disk. Raises UsageError when the job has none."""
        here = runs_here(self.local)
        there = self.ask(lambda store: stored_runs(store, self.keys) if store else set(), enough=bool(here))
        if not here and not there:
            raise UsageError(
                f"job {self.name} has nothing in {self.store.url}", "start it with: cloudrun submit job.yaml"
            )
        return max(here | there)

    def account(self) -> Account:
        """All that the journal tells, from here and from the store."""
        run = self.newest_run()
        here = bool(local_segments(self.local, run, "journal"))
        return self.ask(lambda store: reduce(fold, journal_lines(store, self.local, run), Account()), enough=here)

    def ask(self, question: Callable[[ObjectStore | None], T], *, enough: bool) -> T:
        """The answer with the store's help; without it, and with a word to the person, where this disk is enough."""
        if self.silent and enough:
            return question(None)
        try:
            return question(self.store)
        except StoreError as error:
            if not enough:
                raise
            say_once(f"the store cannot be asked; this is what this machine knows ({error})")
            self.silent.append(error)
            return question(None)


@cache
def say_once(text: str) -> None:
    click.echo(text, err=True)


def find_job(text: str, environ: Mapping[str, str]) -> KnownJob:
    """The job of this name or spec. Raises UsageError when nobody knows it."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or "/" in text:
        return from_spec(path, environ)
    known = [told for told in known_here(environ) if told["job"] == text]
    if len(known) > 1:
        stores = ", ".join(sorted(told["store"] for told in known))
        raise UsageError(f"several jobs are called {text}: in {stores}", "name one by the path of its spec")
    if known:
        return from_record(known[0], environ)
    if path.is_file():
        return from_spec(path, environ)
    hint = "name it by its spec, as in: cloudrun status path/to/job.yaml"
    raise UsageError(f"no job called {text} has run on this machine", hint)


def from_spec(path: Path, environ: Mapping[str, str]) -> KnownJob:
    """By its spec; one that this environment cannot fill in may still be known from its last start here."""
    try:
        spec = load_spec(path, environ=environ)
    except SpecInvalid:
        here = os.path.abspath(path)
        for told in known_here(environ):
            if told.get("spec") == here:
                return from_record(told, environ)
        raise
    job = open_job(spec, environ)
    return KnownJob(spec.name, job.store, job.local, make_policy(spec).keep)


def known_here(environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What every job that ever ran on this machine said of itself."""
    for path in sorted((state_dir(environ) / "jobs").glob("*/supervisor.json")):
        try:
            told = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # half a record of a job is no job; its spec still finds it
        names = isinstance(told, dict) and all(isinstance(told.get(key), str) for key in ("job", "store", "cache"))
        if names and all(isinstance(told.get(key), dict) for key in ("keep", "access")):
            yield told


def from_record(told: Mapping[str, Any], environ: Mapping[str, str]) -> KnownJob:
    local = LocalLayout(state_dir(environ), Path(told["cache"]), told["job"], told["store"])
    store = open_recorded(told["store"], told["access"], environ)
    return KnownJob(told["job"], store, local, keep_of(told["keep"]))


def keep_of(told: Mapping[str, Any]) -> Keep:
    """As :func:`dataclasses.asdict` wrote it."""
    best = told.get("best")
    return Keep(**{**told, "best": Best(**best) if best else None})
