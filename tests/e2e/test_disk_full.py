"""Disks that fill up: real ones, small enough to fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Machine, wait_for
from tests.e2e.trainers import PRELUDE, STEADY

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk"),
]

WriteJob = Callable[..., Path]
QUICK = "restart: {backoff: {first: 50ms, limit: 100ms}}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_dataset_larger_than_the_disk(
    machine: Machine, write_job: WriteJob, diary: Path, small_disk: Path, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / "large.bin").write_bytes(os.urandom(5 << 20))
    spec = write_job(STEADY, lines=[f"cache: {{dir: {small_disk}}}", f"data: [{{source: 'file://{bucket}'}}]"])
    refused = machine.run("submit", str(spec))
    assert refused.returncode == 70
    assert "5 MiB" in refused.stderr
    assert "missing" in refused.stderr
    assert "hint:" in refused.stderr
    assert diary.read_text() == "", "the trainer was not started without its data"
    (bucket / "large.bin").write_bytes(b"small now")
    assert machine.run("submit", str(spec)).returncode == 0


def test_the_disk_fills_up_while_the_trainer_saves(
    machine: Machine, write_job: WriteJob, diary: Path, small_disk: Path
) -> None:
    """The trainer keeps every checkpoint, 1 MB each: the fourth does not fit. Those that are stored make room."""
    script = PRELUDE + (
        "while step < 6:\n"
        "    time.sleep(1.5)\n"
        "    step += 1\n"
        "    save(step, os.urandom(10_000).replace(b'weights', b'w') + b'weights')\n"
        "    print(f'step {step}/6', flush=True)\n"
    )
    spec = write_job(script, lines=[f"cache: {{dir: {small_disk}}}", QUICK, "checkpoints: {every: 100ms}"])
    done = machine.run("submit", str(spec))
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    told = machine.status("job")
    assert told["checkpoint"]["step"] == 6
    assert told["rejected"] == [], "no half-written checkpoint was stored"


def test_a_full_store_is_no_success(machine: Machine, write_job: WriteJob, diary: Path, small_disk: Path) -> None:
    machine.store = small_disk / "store"
    lines = [QUICK, "checkpoints: {every: 100ms}", "storage: {give_up: 2s}"]
    spec = write_job(STEADY, lines=lines)
    spec.write_text(spec.read_text().replace(f"file://{spec.parent.parent / 'store'}", f"file://{machine.store}"))
    machine.store.mkdir()
    filler = small_disk / "filler"
    machine.extra |= {"STEPS": "10", "PAUSE": "0.5"}
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: "is stored" in machine.output())
    fill(filler)
    assert supervisor.wait(60) == 73, machine.output()
    assert "could not be stored" in machine.output()
    assert "kept on this disk" in machine.output()
    told = machine.status("job")
    assert (told["phase"], told["exit_code"]) == ("finished", 73), "an end for lack of time is an end all the same"
    filler.unlink()
    again = machine.run("submit", str(spec))
    assert again.returncode == 0, again.stderr
    assert diary.read_text().splitlines() == ["began at 0", "finished"], "nothing was trained twice"
    assert machine.status("job")["checkpoint"]["step"] == 10


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return
