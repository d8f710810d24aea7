"""Takeovers, one after the other: supervisors of one job, whose holder leaves, dies or is stopped in its tracks.

All machines are on this one, so one clock times everything. What is checked comes from the store (manifests, journals)
and from a diary in which the trainers write what they do.

python -m tests.e2e.takeovers [STORE_URL] [ROUNDS] [PERIOD]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.stored import read_manifest
from runner.core.record import Line
from runner.spec import load_spec
from runner.supervisor.history import journal_lines
from runner.supervisor.lease_body import Body, read_body
from runner.wiring.places import Job, open_job
from tests.e2e.machine import ROOT, Machine, wait_for
from tests.e2e.trainers import PRELUDE

Way = Literal["leaves", "dies", "stops"]
WAYS: tuple[Way, ...] = ("leaves", "dies", "stops")

SECONDS_AFTER_A_RELEASE = 5.0

NOTES_EACH_STEP = (
    PRELUDE
    + """
attempt = os.environ["CLOUDRUN_ATTEMPT"]
while True:
    time.sleep(0.1)
    step += 1
    save(step)
    note(f"step {attempt} {step} {time.time():.3f}")
    print(f"step {step}", flush=True)
"""
)


@dataclass
class Round:
    """One takeover. ``seconds`` are from the release or the death to the new lease; ``back`` to the first new step."""

    way: Way
    epoch: int
    taken_at: float
    seconds: float
    back: float


@dataclass
class Fleet:
    """Machines that all run one job. ``period`` is that of their leases."""

    spec: Path
    job: Job
    diary: Path
    machines: list[Machine]
    period: float
    rounds: list[Round] = field(default_factory=list)
    alive: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, number: int) -> None:
        machine = self.machines[number]
        machine.disk.mkdir(parents=True, exist_ok=True)
        with (machine.disk / "output").open("ab") as out:
            command = [sys.executable, "-m", "tests.e2e.short_lease", str(self.spec), str(self.period)]
            child = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=machine.env, cwd=ROOT)
        machine.running.append(child)
        self.alive[number] = child

    def lease(self) -> Body | None:
        return read_body(self.job.store, self.job.keys.lease())

    def holder(self) -> int:
        """The number of the machine that has the lease."""

        def look() -> list[int]:
            lease = self.lease()
            told = {number: session_on(machine) for number, machine in enumerate(self.machines)}
            return [number for number in self.alive if lease and not lease.released and told[number] == lease.holder]

        found: list[int] = wait_for(look, 60.0)
        return found[0]

    def steps(self) -> list[tuple[int, int, float]]:
        """(attempt, step, epoch seconds) of all that any trainer did."""
        lines = [line.split() for line in self.diary.read_text().splitlines() if line.startswith("step ")]
        return [(int(attempt), int(step), float(at)) for _, attempt, step, at in lines]

    def wait_for_commits(self, epoch: int, count: int = 1) -> None:
        """Until the holder of that epoch has something that another one could go on from."""
        wait_for(lambda: sum(one.epoch == epoch for one in manifests(self.job)) >= count, 60.0, every=0.2)

    def take_over(self, way: Way) -> Round:
        """End the holder in that way, and wait until another one trains."""
        holder, lease = self.holder(), self.lease()
        assert lease is not None
        self.wait_for_commits(lease.epoch)
        wait_for(lambda: (found := self.lease()) and found.standby, 30.0)
        assert all(child.poll() is None for child in self.alive.values()), self.output()
        newest = max(attempt for attempt, _, _ in self.steps())
        began = self.end(holder, way)
        taken_at = self.wait_for_successor(lease.epoch)
        back = wait_for(lambda: [at for attempt, _, at in self.steps() if attempt > newest], 60.0)[0]
        if way == "stops":
            # Its trainer, which nobody has stopped, goes on beside the new one for a while.
            time.sleep(1.0)
            self.resume(holder)
        self.rounds.append(Round(way, lease.epoch + 1, taken_at, taken_at - began, back - began))
        self.start(holder)
        return self.rounds[-1]

    def end(self, holder: int, way: Way) -> float:
        """When the lease was free to be taken: of its release, or of the holder's death."""
        child = self.alive[holder]
        if way == "leaves":
            child.send_signal(signal.SIGTERM)
            wait_for(lambda: (lease := self.lease()) and lease.released, 60.0, every=0.01)
            released_at = time.time()
            assert child.wait(30.0) == 75
            del self.alive[holder]
            return released_at
        child.send_signal(signal.SIGKILL if way == "dies" else signal.SIGSTOP)
        if way == "dies":
            child.wait(30.0)
            del self.alive[holder]
        return time.time()

    def wait_for_successor(self, epoch: int) -> float:
        give_up = time.time() + 60.0
        while (lease := self.lease()) is None or lease.epoch <= epoch:
            assert time.time() < give_up, f"nobody takes over from {lease}\n{self.output()}"
            time.sleep(0.01)
        return time.time()

    def output(self) -> str:
        """What each machine has said, most of it."""
        return "\n".join(f"-- {machine.disk.name}\n{machine.output()[-3000:]}" for machine in self.machines)

    def resume(self, number: int) -> None:
        """The stopped holder goes on: it must find out, stop its trainer and leave."""
        machine, child = self.machines[number], self.alive.pop(number)
        child.send_signal(signal.SIGCONT)
        assert child.wait(30.0) == 75, machine.output()
        assert "another machine has taken over" in machine.output()
        wait_for(machine.has_no_trainer, 5.0)

    def leave(self) -> None:
        for child in self.alive.values():
            child.terminate()
        for child in self.alive.values():
            child.wait(60.0)


def session_on(machine: Machine) -> str | None:
    for path in (machine.disk / "state/cloudrun/jobs").glob("*/supervisor.json"):
        told: dict[str, Any] = json.loads(path.read_bytes())
        return str(told["session"])
    return None


@contextmanager
def fleet(
    folder: Path, store: str, count: int, period: float, extra: Mapping[str, str] | None = None
) -> Iterator[Fleet]:
    """Machines that begin one after the other; all end with the context."""
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text(NOTES_EACH_STEP)
    spec = project / "job.yaml"
    lines = ["name: job", "command: python train.py", f"store: {store}", "stop: {grace: 2s}"]
    spec.write_text("\n".join([*lines, "checkpoints: {every: 300ms, keep: {last: 100000}}"]) + "\n")
    diary = folder / "diary"
    diary.touch()
    environ = {**os.environ, **(extra or {})}
    machines = [
        Machine(folder / f"machine-{number}", folder / "unused", {**(extra or {}), "DIARY": str(diary)})
        for number in range(count)
    ]
    job = open_job(load_spec(spec, environ=environ), environ)
    group = Fleet(spec, job, diary, machines, period)
    try:
        yield group
    finally:
        for machine in machines:
            for child in machine.running:
                child.send_signal(signal.SIGCONT)
            machine.kill_all()


# -- what must hold ----------------------------------------------------------------------------------------------------


def manifests(job: Job) -> list[Manifest]:
    names = job.store.folders(job.keys.checkpoints_prefix(1))
    keys = {info.key for info in job.store.list(job.keys.checkpoints_prefix(1))}
    return [read_manifest(job.store, job.keys, 1, name) for name in names if job.keys.manifest(1, name) in keys]


def committed_at(job: Job) -> dict[str, float]:
    """When each checkpoint's manifest was written, by the store's clock, which here is ours."""
    infos = {info.key: info.modified for info in job.store.list(job.keys.checkpoints_prefix(1))}
    return {one.id: infos[job.keys.manifest(1, one.id)] for one in manifests(job)}


def check(group: Fleet) -> dict[str, Any]:
    """Raises AssertionError where a promise is broken; the figures."""
    done, job = manifests(group.job), group.job
    late = late_commits(group, done, committed_at(job))
    check_one_writer_each_epoch(done)
    check_lineage(list(journal_lines(job.store, job.local, 1)))
    for one in group.rounds:
        bound = SECONDS_AFTER_A_RELEASE if one.way == "leaves" else group.period
        assert one.seconds <= bound, f"a takeover took {one.seconds:.2f} s: {one}"
    assert not late, f"committed after the lease was another's: {late}"
    return figures(group, done)


def late_commits(group: Fleet, done: list[Manifest], committed: Mapping[str, float]) -> list[str]:
    """Commits of a machine that was no longer the holder."""
    taken = {one.epoch: one.taken_at for one in group.rounds}
    return [one.id for one in done if one.epoch + 1 in taken and committed[one.id] > taken[one.epoch + 1]]


def check_one_writer_each_epoch(done: list[Manifest]) -> None:
    writers: dict[int, set[str]] = {}
    for one in done:
        writers.setdefault(one.epoch, set()).add(one.attempt_id)
    assert all(len(sessions) == 1 for sessions in writers.values()), f"two wrote in one epoch: {writers}"


def check_lineage(lines: list[Line]) -> None:
    """Each attempt goes on from the newest of all that its predecessors had committed: no commit is passed over."""
    known: dict[str, tuple[int, int]] = {}
    started = []
    for line in lines:
        event = line["event"]
        if event["type"] == "Recovered":
            known |= {one["id"]: (one["epoch"], one["step"]) for one in event["stored"]}
        for action in line.get("actions", ()):
            if action["type"] == "StartTrainer":
                resumed = action["resume"]
                best = max(known.values(), default=(0, -1))
                have = (resumed["epoch"], resumed["step"]) if resumed else (0, -1)
                assert have >= best, f"attempt {action['attempt']} began at {have}, and {best} was stored"
                started.append(have)
    assert started == sorted(started), f"a trainer went back: {started}"


def figures(group: Fleet, done: list[Manifest]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "takeovers": len(group.rounds),
        "ways": dict(Counter(one.way for one in group.rounds)),
        "period": group.period,
        "checkpoints": len(done),
        "highest epoch": max(one.epoch for one in done),
    }
    for way in WAYS:
        seconds = sorted(one.seconds for one in group.rounds if one.way == way)
        back = sorted(one.back for one in group.rounds if one.way == way)
        if seconds:
            told[f"{way}: lease, median and most"] = (round(seconds[len(seconds) // 2], 2), round(seconds[-1], 2))
            told[f"{way}: training again, median and most"] = (round(back[len(back) // 2], 2), round(back[-1], 2))
    told["seconds with two trainers, most"] = round(max(overlaps(group.steps()), default=0.0), 2)
    return told


def overlaps(steps: list[tuple[int, int, float]]) -> list[float]:
    """For each attempt, how long the one before it went on beside it."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for attempt, _, at in steps:
        first.setdefault(attempt, at)
        last[attempt] = at
    return [max(last[one] - first[one + 1], 0.0) for one in last if one + 1 in first]


def run(folder: Path, store: str, rounds: int, period: float, seed: int = 0) -> dict[str, Any]:
    """Two supervisors and a third one on standby; so many takeovers; what they amount to."""
    dice = Random(seed)
    with fleet(folder, store, 3, period) as group:
        for number in range(3):
            group.start(number)
            group.holder()
        for number in range(rounds):
            one = group.take_over(dice.choice(WAYS))
            print(f"{number + 1}/{rounds} {one}", flush=True)
        group.leave()
        return check(group)


def main(store: str = "", rounds: str = "50", period: str = "3") -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = run(Path(folder), store or f"file://{folder}/store", int(rounds), float(period))
    for name, value in told.items():
        print(f"{name:<45} {value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
