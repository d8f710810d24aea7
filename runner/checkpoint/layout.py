"""Every key in the store and every name on the local disk is made, and read back, here.

Keys are relative to the store's root and begin with the job's name. Parsers answer None for whatever this module did
not make: a store may hold foreign objects, and some of them may be there to fool us.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "cloudrun-manifest.json"

_JOB = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ID = re.compile(r"[0-9a-f]{6}")
_NUMBER = r"[1-9][0-9]{0,8}"
_RUN = re.compile(rf"run-({_NUMBER})")
_CHECKPOINT = re.compile(rf"step-([0-9]{{12,18}})\.a({_NUMBER})-([0-9a-f]{{6}})")
_ATTEMPT = re.compile(rf"a({_NUMBER})-[0-9a-f]{{6}}(?:\.jsonl\.d)?")
_JOURNAL = re.compile(rf"journal/a({_NUMBER})-([0-9a-f]{{6}})\.jsonl\.d/([0-9]{{6,12}})")
_LOG = re.compile(rf"logs/a({_NUMBER})-([0-9a-f]{{6}})/([0-9]{{6,12}})\.log")


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """What a checkpoint's id says."""

    step: int
    attempt: int
    attempt_id: str


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """A key below a run's checkpoints: the checkpoint's id, and the path of the file inside it."""

    id: str
    path: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an attempt's journal or log. ``kind`` is ``journal`` or ``logs``; ``number`` counts from 1."""

    run: int
    kind: str
    attempt: int
    attempt_id: str
    number: int


def attempt_name(attempt: int, attempt_id: str) -> str:
    """``a7-3f9c2d``. Raises ValueError for an attempt below 1 or an id that is not 6 lowercase hex digits."""
    if attempt < 1 or not _ID.fullmatch(attempt_id):
        raise ValueError(f"no attempt is called {attempt}, {attempt_id!r}")
    return f"a{attempt}-{attempt_id}"


def checkpoint_id(step: int, attempt: int, attempt_id: str) -> str:
    """``step-000000001200.a7-3f9c2d``: sorts by step. Raises ValueError for a step that is negative or absurd."""
    if not 0 <= step < 10**18:
        raise ValueError(f"no checkpoint has step {step}")
    return f"step-{step:012d}.{attempt_name(attempt, attempt_id)}"


def parse_checkpoint_id(text: str) -> CheckpointName | None:
    match = _CHECKPOINT.fullmatch(text)
    if match is None:
        return None
    name = CheckpointName(int(match[1]), int(match[2]), match[3])
    canonical = checkpoint_id(name.step, name.attempt, name.attempt_id) == text
    return name if canonical else None


def _run_folder(run: int) -> str:
    if run < 1:
        raise ValueError(f"runs are numbered from 1, not {run}")
    return f"run-{run}"


def _journal_segment(attempt: str, number: int) -> str:
    return f"journal/{attempt}.jsonl.d/{_counted(number)}"


def _log_segment(attempt: str, number: int) -> str:
    return f"logs/{attempt}/{_counted(number)}.log"


def _counted(number: int) -> str:
    if number < 1:
        raise ValueError(f"segments are numbered from 1, not {number}")
    return f"{number:06d}"


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The keys of one job. Runs are numbered 1, 2, 3... Raises ValueError for a job name the spec would refuse."""

    job: str

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job):
            raise ValueError(f"no job is called {self.job!r}")

    def prefix(self) -> str:
        return f"{self.job}/"

    def status(self) -> str:
        return f"{self.job}/status.json"

    def lease(self) -> str:
        return f"{self.job}/lease.json"

    def run_prefix(self, run: int) -> str:
        return f"{self.job}/{_run_folder(run)}/"

    def job_yaml(self, run: int) -> str:
        return f"{self.run_prefix(run)}job.yaml"

    def done(self, run: int) -> str:
        return f"{self.run_prefix(run)}DONE"

    def checkpoints_prefix(self, run: int) -> str:
        return f"{self.run_prefix(run)}checkpoints/"

    def checkpoint_prefix(self, run: int, checkpoint: str) -> str:
        """Raises ValueError for an id that :func:`checkpoint_id` cannot have made."""
        if parse_checkpoint_id(checkpoint) is None:
            raise ValueError(f"no checkpoint has the id {checkpoint!r}")
        return f"{self.checkpoints_prefix(run)}{checkpoint}/"

    def manifest(self, run: int, checkpoint: str) -> str:
        """The object whose existence is the checkpoint's existence."""
        return f"{self.checkpoint_prefix(run, checkpoint)}{MANIFEST_NAME}"

    def journal_segment(self, run: int, attempt: str, number: int) -> str:
        """``attempt`` is an :func:`attempt_name`; ``number`` counts from 1."""
        return self.run_prefix(run) + _journal_segment(attempt, number)

    def log_segment(self, run: int, attempt: str, number: int) -> str:
        """``attempt`` is an :func:`attempt_name`; ``number`` counts from 1."""
        return self.run_prefix(run) + _log_segment(attempt, number)

    def run_of(self, key: str) -> int | None:
        """The run that a key of this job belongs to."""
        job, _, rest = key.partition("/")
        folder, slash, _ = rest.partition("/")
        match = _RUN.fullmatch(folder)
        return int(match[1]) if match and slash and job == self.job else None

    def attempt_in(self, folder: str) -> int | None:
        """The attempt that made a folder of a run: a checkpoint, a journal, a log."""
        checkpoint = parse_checkpoint_id(folder)
        if checkpoint is not None:
            return checkpoint.attempt
        match = _ATTEMPT.fullmatch(folder)
        return int(match[1]) if match else None

    def parse_checkpoint_key(self, run: int, key: str) -> CheckpointKey | None:
        prefix = self.checkpoints_prefix(run)
        if not key.startswith(prefix):
            return None
        checkpoint, _, path = key[len(prefix) :].partition("/")
        return CheckpointKey(checkpoint, path) if path and parse_checkpoint_id(checkpoint) else None

    def parse_segment(self, key: str) -> Segment | None:
        run = self.run_of(key)
        if run is None:
            return None
        rest = key[len(self.run_prefix(run)) :]
        match = _JOURNAL.fullmatch(rest) or _LOG.fullmatch(rest)
        if match is None or int(match[3]) < 1:
            return None
        return Segment(run, rest.partition("/")[0], int(match[1]), match[2], int(match[3]))


def state_dir(environ: Mapping[str, str]) -> Path:
    """The default state directory, by the XDG rules: a relative ``XDG_STATE_HOME`` counts as unset."""
    chosen = environ.get("XDG_STATE_HOME", "")
    if chosen.startswith("/"):
        return Path(chosen) / "cloudrun"
    home = environ.get("HOME") or str(Path.home())
    return Path(home) / ".local" / "state" / "cloudrun"


def job_folder(job: str, store_url: str) -> str:
    """One folder name per job and store: the same job name in two stores is two jobs."""
    digest = hashlib.sha256(store_url.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{StoreLayout(job).job}@{digest[:8]}"


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """The names of one job on this machine: small files under ``state``, everything of a run's size under the cache."""

    state_dir: Path
    cache_dir: Path
    job: str
    store_url: str

    @property
    def state(self) -> Path:
        return self.state_dir / "jobs" / job_folder(self.job, self.store_url)

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def supervisor(self) -> Path:
        return self.state / "supervisor.json"

    @property
    def stop_request(self) -> Path:
        return self.state / "stop-request.json"

    @property
    def console(self) -> Path:
        return self.state / "console.log"

    @property
    def lease_note(self) -> Path:
        return self.state / "lease.json"

    @property
    def upload_notes(self) -> Path:
        """How far the upload is that is under way."""
        return self.state / "upload"

    @property
    def trained(self) -> Path:
        return self.state / "trained.json"

    def setup_done(self, digest: str) -> Path:
        """The mark that the setup script with this digest has run on this machine."""
        if not digest.isalnum():
            raise ValueError(f"not a digest: {digest!r}")
        return self.state / f"setup-{digest}.done"

    def journal_segment(self, run: int, attempt: str, number: int) -> Path:
        """The local copy of :meth:`StoreLayout.journal_segment`."""
        return self.state / _run_folder(run) / _journal_segment(attempt, number)

    def log_segment(self, run: int, attempt: str, number: int) -> Path:
        """The local copy of :meth:`StoreLayout.log_segment`."""
        return self.state / _run_folder(run) / _log_segment(attempt, number)

    def run_state(self, run: int) -> Path:
        """The mirror of the store's ``run-<run>/``: journal and logs."""
        return self.state / _run_folder(run)

    def run_cache(self, run: int) -> Path:
        """Checkpoints, set-aside ones and temporary files of a run: one file system, so that renames are atomic."""
        return self.cache_dir / "jobs" / job_folder(self.job, self.store_url) / _run_folder(run)

    def checkpoints(self, run: int) -> Path:
        return self.run_cache(run) / "checkpoints"

    def set_aside(self, run: int) -> Path:
        return self.run_cache(run) / "set-aside"

    def tmp(self, run: int) -> Path:
        return self.run_cache(run) / "tmp"

    def stop_file(self, run: int) -> Path:
        return self.run_cache(run) / "stop"
