"""What the trainer sees: its environment and its command line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Meant for the supervisor alone: a trainer that answers systemd in our name would confuse it.
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one attempt runs and what it goes on from. ``resume_path`` is empty when there is nothing to resume."""

    job: str
    store_url: str
    run: int
    attempt: int
    data_dir: Path
    checkpoint_dir: Path
    stop_file: Path
    tmp_dir: Path
    resume_path: str
    resume_step: int | None
    threads: str


def trainer_environment(base: Mapping[str, str], own: Mapping[str, str], place: Place) -> dict[str, str]:
    """The supervisor's environment, the spec's on top, then ours.

    Defaults that a user may set (TMPDIR, OMP_NUM_THREADS, ...) give way; the CLOUDRUN variables do not.
    """
    result = {name: value for name, value in base.items() if name not in NOT_INHERITED} | dict(own)
    for name, value in defaults(place).items():
        result.setdefault(name, value)
    return result | {
        "CLOUDRUN_JOB": place.job,
        "CLOUDRUN_RUN": str(place.run),
        "CLOUDRUN_ATTEMPT": str(place.attempt),
        "CLOUDRUN_DATA_DIR": str(place.data_dir),
        "CLOUDRUN_CHECKPOINT_DIR": str(place.checkpoint_dir),
        "CLOUDRUN_RESUME_FROM": place.resume_path,
        "CLOUDRUN_RESUME_STEP": "" if place.resume_step is None else str(place.resume_step),
        "CLOUDRUN_STOP_FILE": str(place.stop_file),
    }


def defaults(place: Place) -> dict[str, str]:
    """Trackers get one identity per run, so that a preempted training is one curve, not many."""
    identity = hashlib.sha256(f"{place.store_url}\n{place.job}\n{place.run}".encode()).hexdigest()
    return {
        "TMPDIR": str(place.tmp_dir),
        "OMP_NUM_THREADS": place.threads,
        "PYTHONUNBUFFERED": "1",
        "WANDB_RUN_ID": f"{place.job}-{place.run}-{identity[:8]}",
        "WANDB_RESUME": "allow",
        "MLFLOW_RUN_ID": identity[:32],
    }


def command_line(argv: Sequence[str], resume: Sequence[str], place: Place) -> list[str]:
    """The command, and when there is something to resume, the arguments that say so."""
    if not place.resume_path:
        return list(argv)
    step = "" if place.resume_step is None else str(place.resume_step)
    return [*argv, *(word.replace("{path}", place.resume_path).replace("{step}", step) for word in resume)]


def threads_of_this_machine() -> str:
    """The thread count of a new run; later attempts keep it, since the bits of a sum depend on it."""
    return str(len(os.sched_getaffinity(0)))
