"""One machine at a time: real supervisors, one store, and a holder that leaves, dies or is stopped in its tracks."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine import Machine, wait_for
from tests.e2e.takeovers import WAYS, Way, check, fleet, run
from tests.e2e.trainers import PRELUDE, SAVES_ON_SIGTERM, STEADY
from tests.servers import Server

WriteJob = Callable[..., Path]
QUICK = ("restart: {backoff: {first: 50ms, limit: 100ms}}", "checkpoints: {every: 100ms}")

ENDS_WHEN_TOLD = (
    PRELUDE
    + """
save(1)
print("step 1", flush=True)
while not os.path.exists(os.environ["ENOUGH"]):
    time.sleep(0.05)
note("finished")
"""
)


@pytest.fixture
def other(machine: Machine, tmp_path: Path, diary: Path) -> Iterator[Machine]:
    """A second machine, which sees the same store."""
    one = Machine(tmp_path / "other", machine.store, machine.extra)
    yield one
    one.kill_all()


def lease_of(machine: Machine) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((machine.store / "job/lease.json").read_bytes())
    return told


def one_takeover(folder: Path, store: str, way: Way, extra: Mapping[str, str] | None = None) -> None:
    with fleet(folder, store, 2, period=3.0, extra=extra) as group:
        for number in range(2):
            group.start(number)
            group.holder()
        group.take_over(way)
        group.leave()
        told = check(group)
    assert told["takeovers"] == 1
    assert told["highest epoch"] == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_standby_takes_over_in_time_and_goes_on_from_the_newest(tmp_path: Path, way: Way) -> None:
    one_takeover(tmp_path, f"file://{tmp_path}/store", way)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_in_a_bucket(
    tmp_path: Path, seaweedfs: Server, fresh_bucket: Callable[[Server], str], way: Way
) -> None:
    extra = {**seaweedfs.environ(), "AWS_ENDPOINT_URL": seaweedfs.endpoint}
    one_takeover(tmp_path, f"s3://{fresh_bucket(seaweedfs)}/jobs", way, extra)


def test_a_standby_waits_until_the_job_is_done_and_ends_well(
    machine: Machine, other: Machine, write_job: WriteJob, diary: Path, tmp_path: Path
) -> None:
    machine.extra["ENOUGH"] = str(tmp_path / "enough")
    spec = write_job(ENDS_WHEN_TOLD, lines=QUICK)
    first = machine.start("submit", str(spec))
    wait_for(lambda: "step 1\n" in machine.output())
    second = other.start("submit", str(spec))
    wait_for(lambda: "runs this job since" in other.output())
    told, here = machine.status("job"), other.status(str(spec))
    assert (told["phase"], told["alive"], told["lease"]["epoch"]) == ("running", True, 1)
    assert (here["phase"], here["alive"], here["lease"]["holder"]) == ("waiting", True, told["lease"]["holder"])
    assert "runs this job" in here["reason"]
    wait_for(lambda: len(machine.status("job")["lease"]["standby"]) == 1)
    assert "runs this job now" in other.run("submit", str(spec), "--dry-run").stdout
    shown = other.run("status", str(spec)).stdout
    assert "waiting, as a standby" in shown
    assert "standing by: " in shown
    (tmp_path / "enough").touch()
    assert first.wait(60) == 0, machine.output()
    assert second.wait(30) == 0, other.output()
    assert "taking over: this machine runs the job now" in other.output()
    assert diary.read_text().splitlines() == ["began at 0", "finished"], "it has not trained"
    assert machine.status("job")["lease"] is None


def test_a_standby_that_is_asked_to_leave_does_so_at_once_and_leaves_the_lease_alone(
    machine: Machine, other: Machine, write_job: WriteJob, diary: Path
) -> None:
    spec = write_job(SAVES_ON_SIGTERM, lines=QUICK)
    first = machine.start("submit", str(spec))
    wait_for(lambda: "step 3" in machine.output())
    second = other.start("submit", str(spec))
    wait_for(lambda: "runs this job since" in other.output())
    held = lease_of(machine)
    second.terminate()
    assert second.wait(5) == 75, other.output()
    now = lease_of(machine)
    assert (now["holder"], now["epoch"], now["released"]) == (held["holder"], 1, False)
    assert first.poll() is None
    assert not list((other.disk / "state").glob("cloudrun/jobs/*/run-*")), "it has no history of its own"
    first.terminate()
    assert first.wait(20) == 75
    assert lease_of(machine)["released"]


def test_the_same_machine_goes_on_at_once_after_its_supervisor_was_killed(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    """The period is the usual one: to wait for it would take half a minute."""
    machine.extra |= {"STEPS": "1000"}
    spec = write_job(STEADY, lines=QUICK)
    first = machine.start("submit", str(spec))
    wait_for(lambda: "is stored" in machine.output())
    first.kill()
    first.wait()
    began = time.monotonic()
    machine.start("submit", str(spec))
    wait_for(lambda: diary.read_text().count("began at") == 2)
    assert time.monotonic() - began < 20.0
    assert lease_of(machine)["epoch"] == 2
    assert "runs this job since" not in machine.output()


def test_standby_begins_nothing_and_follows_who_has_begun(
    machine: Machine, other: Machine, write_job: WriteJob, diary: Path
) -> None:
    spec = write_job(SAVES_ON_SIGTERM, lines=QUICK)
    refused = other.run("submit", str(spec), "--standby", "--fresh")
    assert refused.returncode == 64
    other.start("submit", str(spec), "--standby")
    wait_for(lambda: "no machine has begun this job yet" in other.output())
    assert not (machine.store / "job").exists()
    first = machine.start("submit", str(spec))
    wait_for(lambda: "step 3" in machine.output())
    wait_for(lambda: "runs this job since" in other.output())
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 75
    wait_for(lambda: diary.read_text().count("began at") == 2, 10.0)
    saved = int(diary.read_text().split("saved ")[1].split()[0])
    assert f"began at {saved}" in diary.read_text()


def test_a_store_that_is_not_mounted_gets_no_lease(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    machine.store.rename(machine.store.with_name("elsewhere"))
    machine.store.mkdir()
    refused = machine.run("submit", str(spec))
    assert refused.returncode == 69
    assert list(machine.store.iterdir()) == []
    assert refused.stderr.count("is not in file://") == 1, "why it leaves is told once"
    assert "error: run 1 of job job" in refused.stderr


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_takeovers(tmp_path: Path) -> None:
    """Run by hand (-m soak -s): prints how long each took. Other stores: python -m tests.e2e.takeovers STORE_URL."""
    told = run(tmp_path, f"file://{tmp_path}/store", rounds=50, period=3.0)
    assert told["takeovers"] == 50
    for name, value in told.items():
        print(f"{name:<45} {value}")
