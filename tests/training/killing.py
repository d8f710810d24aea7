"""Runs trainings in processes of their own, kills them at random moments, and tells what they saw and came to."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

_TRAININGS = "tests.training.lives"


@dataclass(frozen=True, slots=True)
class Life:
    """What one training is told: its kind, where it saves, how many steps, and who it is among the ranks."""

    kind: str
    folder: Path
    total: int = 30
    workers: int = 0
    rank: int = 0
    world: int = 1
    attempt: int = 0

    @property
    def seen(self) -> Path:
        return self.folder / f"seen-{self.rank}"

    @property
    def end(self) -> Path:
        return self.folder / f"end-{self.rank}"


def nursery() -> ForkServerContext:
    """Where lives come from: a process that has imported torch already and used none of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_TRAININGS])
    return context


def _live(life: Life) -> None:
    importlib.import_module(_TRAININGS).live(life)


@contextlib.contextmanager
def begun(life: Life) -> Iterator[list[ForkServerProcess]]:
    """The processes of a life, one for each rank; killed at the end, if not before."""
    lives = [dataclasses.replace(life, rank=rank) for rank in range(life.world)]
    processes = [nursery().Process(target=_live, args=(one,)) for one in lives]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def undisturbed(life: Life) -> tuple[list[dict[int, list[str]]], list[str]]:
    """Run to the end; what each rank saw and came to."""
    finish(life)
    return outcome(life)


def finish(life: Life) -> None:
    with begun(life) as processes:
        for process in processes:
            process.join(90)
            assert process.exitcode == 0


def kill_at_random(life: Life, chance: random.Random, kills: int) -> int:
    """Begin the training again and again, and SIGKILL it at a random moment; returns how many lives that ended."""
    ended = 0
    for attempt in range(kills):
        goal = reached(life) + chance.randrange(1, max(2, 2 * life.total // (kills + 1)))
        with begun(dataclasses.replace(life, attempt=attempt)) as processes:
            while reached(life) < goal and all(process.is_alive() for process in processes):
                time.sleep(0.001)
            time.sleep(chance.random() * 0.01)
            ended += any(process.is_alive() for process in processes)
    return ended


def reached(life: Life) -> int:
    """The newest step that rank 0 began."""
    lines = life.seen.read_text().splitlines() if life.seen.exists() else []
    return max((int(line.split()[0]) for line in lines), default=0)


def outcome(life: Life) -> tuple[list[dict[int, list[str]]], list[str]]:
    """What each rank saw at each step, and what it came to. A step that was done twice must have seen the same."""
    lives = [dataclasses.replace(life, rank=rank) for rank in range(life.world)]
    return [_seen(one) for one in lives], [one.end.read_text() for one in lives]


def _seen(life: Life) -> dict[int, list[str]]:
    """By step, the data in order, each once: after a kill steps are done again."""
    seen: dict[int, list[str]] = {}
    for line in life.seen.read_text().splitlines():
        step, digest = line.split()
        if digest not in seen.setdefault(int(step), []):
            seen[int(step)].append(digest)
    return seen
