"""What one life of a supervisor works with: built once, in wiring, and shared by all effects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.layout import LocalLayout, StoreLayout
from runner.clock import Clock
from runner.core.events import Event
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.dataset.sync import SyncProgress
from runner.spec import JobSpec
from runner.storage.api import ObjectStore
from runner.supervisor.lease import LeaseKeeper
from runner.supervisor.output import Console, Secrets


@dataclass(frozen=True, slots=True)
class Session:
    """The parts. ``leaving`` is set when the supervisor goes: whatever takes long ends early.

    store     may be written only while the lease is ours, and says so itself
    id        six hex digits; part of every name this session writes, so that nobody else can write it
    sources   the datasets, each with its folder below the data directory (empty: the data directory itself)
    environ   the supervisor's own environment
    fresh     begin a new run
    terminal  shows the trainer's output to a person; None where nobody looks
    progress  is told how a dataset comes along
    """

    id: str
    spec: JobSpec
    store: ObjectStore
    lease: LeaseKeeper
    keys: StoreLayout
    local: LocalLayout
    cache: DataCache
    sources: tuple[tuple[str, Source], ...]
    environ: Mapping[str, str]
    host: str
    fresh: bool
    post: Callable[[Event], None]
    terminal: Console | None
    progress: Callable[[SyncProgress], None]
    secrets: Secrets
    clock: Clock
    leaving: threading.Event

    def folders(self, run: int) -> Folders:
        """Where the run lives on this disk. What is renamed to and fro shares the checkpoint folder's file system."""
        local = self.local
        own = self.spec.checkpoint_dir
        beside = own or (self.spec.working_directory if self.spec.checkpoint_globs else None)
        if beside is None:
            return Folders(local.checkpoints(run), local.set_aside(run), local.tmp(run), local.stop_file(run))
        aside, tmp = beside / ".cloudrun-set-aside", beside / ".cloudrun-tmp"
        return Folders(own or local.checkpoints(run), aside, tmp, local.stop_file(run))


@dataclass(frozen=True, slots=True)
class Folders:
    """Places of one run on the local disk."""

    checkpoints: Path
    set_aside: Path
    tmp: Path
    stop_file: Path
