"""A real training with a real library, killed again and again on machines whose disks are lost, and what must hold.

The scripts are those of configs/trainers: none of them knows of cloudrun. TRAINERS_PYTHON is the interpreter that has
the libraries; without it, the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.stored import read_manifest
from runner.core.record import Line
from runner.spec import load_spec
from runner.supervisor.history import journal_lines
from runner.wiring.places import Job, open_job
from tests.e2e.machine import ROOT, Machine, wait_for
from tests.e2e.takeovers import check_lineage

PYTHON = os.environ.get("TRAINERS_PYTHON", sys.executable)
CONFIGS = ROOT / "configs" / "trainers"
ON_CPU = ROOT / "tests" / "trainers" / "on_cpu"
LEASE = 3.0

Who = Literal["trainer", "supervisor", "machine", "notice"]
When = Literal["any", "mid-save"]
Way = tuple[Who, When]


@dataclass(frozen=True)
class Trainer:
    """One of configs/trainers.

    folder     where its script saves, relative to the script
    command    what runs, with ``{steps}`` filled in
    modules    what the interpreter must have
    steps      long enough for two deaths on the way
    ahead      what its script tells for the first step after a resume, less the step of the checkpoint
    """

    name: str
    folder: str
    command: str
    modules: tuple[str, ...]
    steps: int = 300
    steps_per_kill: int = 60
    ahead: int = 1

    def require(self) -> None:
        missing = [module for module in self.modules if module not in modules_of(PYTHON, self.modules)]
        if missing:
            pytest.skip(f"{PYTHON} has no {', '.join(missing)}: set TRAINERS_PYTHON to an interpreter that has it")


@cache
def modules_of(python: str, wanted: tuple[str, ...]) -> frozenset[str]:
    code = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *wanted], capture_output=True, text=True, check=True)
    return frozenset(found.stdout.split())


@dataclass(frozen=True)
class Kill:
    """``attempt`` had told ``step`` as its last when it died.

    trainer      SIGKILL to the processes of the script
    supervisor   SIGKILL to the supervisor, with which its trainer goes
    machine      the same, and the disk is lost
    notice       SIGTERM to the supervisor, as before a machine is taken away; then the disk is lost
    """

    who: Who
    when: When
    attempt: int
    step: int


@dataclass
class Course:
    """One training from its first step to its end, over as many machines as it takes.

    more    overrides of the job spec, as of ``--set``
    told    attempt -> the steps that it has told
    """

    trainer: Trainer
    machine: Machine
    steps: int
    more: Sequence[str] = ()
    told: dict[int, list[int]] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    @property
    def project(self) -> Path:
        return self.machine.disk / "project"

    @property
    def saves(self) -> Path:
        return self.project / self.trainer.folder

    def overrides(self) -> list[str]:
        return [
            f"command={self.trainer.command.format(steps=self.steps)}",
            f"store=file://{self.machine.store}",
            f"env.PYTHONPATH={ON_CPU}",
            "env.OMP_NUM_THREADS=1",
            f"env.YOLO_CONFIG_DIR={self.machine.disk}",
            "checkpoints.every=200ms",
            "checkpoints.keep.last=100000",
            "restart.backoff.first=50ms",
            "restart.backoff.limit=100ms",
            "restart.max_without_progress=10",
            "logs.upload_every=500ms",
            *self.more,
        ]

    def submit(self) -> subprocess.Popen[str]:
        """A supervisor on this machine, which gets the script first when it is a new one."""
        if not self.project.exists():
            shutil.copytree(CONFIGS / self.trainer.name, self.project)
        self.machine.extra["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
        spec = self.project / "job.yaml"
        command = [sys.executable, "-m", "tests.trainers.submit", str(spec), str(LEASE), *self.overrides()]
        with (self.machine.disk / "output").open("ab") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=self.machine.env, cwd=ROOT)
        self.machine.running.append(child)
        return child

    @property
    def job(self) -> Job:
        # Any of its scripts will do: the disk may be gone, and the folders of the job are those of the machine.
        spec = load_spec(CONFIGS / self.trainer.name / "job.yaml", overrides=self.overrides(), environ=self.machine.env)
        return open_job(spec, self.machine.env)

    def run(self, ways: Sequence[Way], seed: int = 0) -> None:
        """To its end, which is exit code 0, with these deaths on the way, or fewer when it is done before."""
        dice = Random(seed)
        supervisor = self.submit()
        for who, when in ways:
            if not self.wait_for_more(supervisor):
                break
            self.wait_for_moment(when, dice, supervisor)
            self.kill(who, when, supervisor)
            if supervisor.poll() is not None:
                supervisor = self.submit()
        code = supervisor.wait(240.0)
        self.read_steps()
        assert code == 0, self.machine.output()[-6000:]

    def wait_for_more(self, supervisor: subprocess.Popen[str]) -> bool:
        """Until something new is stored and the newest attempt trains. False when the training is over."""
        before = len(self.stored())

        def ready() -> Literal["ready", "over", ""]:
            if supervisor.poll() is not None or self.is_done():
                return "over"
            self.read_steps()
            # An attempt that was killed already must not be waited for.
            latest = max(self.told, default=0)
            killed = self.kills[-1].attempt if self.kills else 0
            return "ready" if len(self.stored()) > before and latest > killed and self.told[latest] else ""

        return bool(wait_for(ready, 90.0, every=0.1) == "ready")

    def wait_for_moment(self, when: When, dice: Random, supervisor: subprocess.Popen[str]) -> None:
        if when == "any":
            time.sleep(dice.uniform(0.0, 1.0))
            return
        before = shape(self.saves)
        give_up = time.monotonic() + 10.0
        while shape(self.saves) == before and time.monotonic() < give_up and supervisor.poll() is None:
            time.sleep(0.0005)
        time.sleep(dice.choice((0.0, dice.uniform(0.0, 0.02))))

    def kill(self, who: Who, when: When, supervisor: subprocess.Popen[str]) -> None:
        if who == "trainer":
            for pid in self.machine.trainers():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif who == "notice":
            supervisor.terminate()
            # Whatever the trainer's exit code is: Lightning's is 0, with the training unfinished.
            assert supervisor.wait(90.0) in (75, 0), self.machine.output()[-3000:]
        else:
            supervisor.kill()
            supervisor.wait()
        if who != "trainer":
            wait_for(self.machine.has_no_trainer, 10.0)
        self.read_steps()
        attempt = max(self.told, default=0)
        self.kills.append(Kill(who, when, attempt, self.told[attempt][-1] if attempt else 0))
        if who in ("machine", "notice"):
            self.machine.wipe()

    def read_steps(self) -> None:
        """What attempts have told until now: the logs of this machine, since those of another went with it."""
        for log in sorted(self.machine.disk.glob("state/cloudrun/jobs/*/run-1/logs/*/*.log")):
            attempt = int(log.parent.name.partition("-")[0].removeprefix("a"))
            words = [line.split()[1] for line in log.read_text(errors="replace").splitlines() if is_step(line)]
            found = [int(word.partition("/")[0]) for word in words]
            if len(found) > len(self.told.get(attempt, ())):
                self.told[attempt] = found

    def stored(self) -> list[Path]:
        return [path.parent for path in self.machine.store.glob("*/run-1/checkpoints/*/cloudrun-manifest.json")]

    def is_done(self) -> bool:
        return any(self.machine.store.glob("*/run-1/DONE"))


_WHO: tuple[Who, ...] = ("trainer", "supervisor", "machine", "notice")
_WHEN: tuple[When, ...] = ("any", "mid-save", "mid-save")


def drawn(count: int, seed: int) -> list[Way]:
    """So many deaths, each kind as often as the others."""
    dice = Random(seed)
    ways = [(_WHO[number % len(_WHO)], dice.choice(_WHEN)) for number in range(count)]
    dice.shuffle(ways)
    return ways


def is_step(line: str) -> bool:
    head, _, rest = line.partition(" ")
    return head in ("step", "epoch") and rest.partition("/")[0].isdigit()


def shape(folder: Path) -> set[tuple[str, int, int]]:
    """Every file below it with size and time: any write changes it."""
    found = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                found.add((os.path.join(parent, name), status.st_size, status.st_mtime_ns))
    return found


# -- what must hold ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """lost: what each kill cost, in steps."""

    stored: int
    lost: Sequence[tuple[Kill, int]]

    def told(self) -> Iterator[str]:
        yield f"{len(self.lost)} kills, {self.stored} checkpoints stored, all load"
        for who in _WHO:
            steps = [lost for kill, lost in self.lost if kill.who == who]
            if steps:
                yield f"{who:<10} {len(steps):>3} kills, steps lost: at most {max(steps)}, each {steps}"


def check(course: Course, kills: int) -> Result:
    """Raises AssertionError where a promise is broken."""
    assert len(course.kills) == kills, f"the training was over after {len(course.kills)} kills: give it more steps"
    assert course.stored()
    job = course.job
    lines = list(journal_lines(job.store, job.local, 1))
    check_lineage(lines)
    began = dict(resumptions(lines, course.trainer.ahead))
    check_first_steps(course, began)
    check_exits(course, lines)
    check_loads(course, job)
    return Result(len(course.stored()), [(kill, lost_by(kill, began)) for kill in course.kills])


def resumptions(lines: Sequence[Line], ahead: int) -> Iterator[tuple[int, int]]:
    """(attempt, the first step that it has to train)."""
    for line in lines:
        for action in line.get("actions", ()):
            if action["type"] == "StartTrainer":
                yield action["attempt"], action["resume"]["step"] + ahead if action["resume"] else 1


def lost_by(kill: Kill, began: Mapping[int, int]) -> int:
    """Steps that were trained twice. The supervisor may have died before it wrote down the last one."""
    later = min((attempt for attempt in began if attempt > kill.attempt), default=None)
    return max(0, kill.step + 1 - began[later]) if later is not None else 0


def check_first_steps(course: Course, began: Mapping[int, int]) -> None:
    """Each attempt really trained on from what it was given, and the last one to the end."""
    found = {attempt: (began[attempt], steps[0]) for attempt, steps in course.told.items() if attempt in began}
    assert not {attempt: one for attempt, one in found.items() if one[0] != one[1]}, "attempt: (should begin, began)"
    assert max(began.values()) > 1
    assert course.told[max(course.told)][-1] == course.steps


def check_exits(course: Course, lines: Sequence[Line]) -> None:
    """No attempt failed by itself: not one was given something that it could not load."""
    asked = {kill.attempt for kill in course.kills if kill.who == "notice"}
    exits = [line["event"] for line in lines if line["event"]["type"] == "TrainerExited"]
    codes = {event["code"] for event in exits if event["attempt"] not in asked}
    assert codes <= {0, -signal.SIGKILL}, f"trainers ended with {codes}"


def check_loads(course: Course, job: Job) -> None:
    """Every stored checkpoint, opened by the library that wrote it, is whole, and of the step that we say."""
    at = course.machine.disk / "loads"
    told = {}
    for folder in course.stored():
        manifest = read_manifest(job.store, job.keys, 1, folder.name)
        told[str(as_written(folder, manifest, at / folder.name))] = manifest.step
    loader = [PYTHON, str(ROOT / "tests" / "trainers" / "load.py"), course.trainer.name]
    env = course.machine.env | {"PYTHONPATH": str(ON_CPU), "YOLO_CONFIG_DIR": str(course.machine.disk)}
    done = subprocess.run(
        loader, input="\n".join(told), capture_output=True, text=True, env=env, cwd=course.machine.disk, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found == told


def as_written(folder: Path, manifest: Manifest, at: Path) -> Path:
    """The checkpoint under the name that its trainer gave it."""
    at.mkdir(parents=True)
    place = at / manifest.name
    place.symlink_to(folder if manifest.kind == "folder" else folder / manifest.files[0].path)
    return place
