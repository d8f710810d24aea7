"""Saves into shared memory, in whole jobs: whoever is killed, what was copied there is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.supervisor.slots import read_slot
from tests.e2e.machine import ROOT, Machine, wait_for

WriteJob = Callable[..., Path]
QUICK = "restart: {backoff: {first: 50ms, limit: 100ms}}"

# Saves at each fifth step. Before the tenth it waits to be let go, if it has not been here before.
SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from runner.training import Checkpointer
torch.set_num_threads(1)
model = torch.nn.Linear(700, 700)
optimizer = torch.optim.Adam(model.parameters())
checkpointer = Checkpointer({{"model": model, "optimizer": optimizer}}, every=5, total=20)
start = checkpointer.restore()
with open(os.environ["DIARY"], "a") as diary:
    diary.write(f"began at {{start}}\\n")
with open(os.environ["DIARY"] + ".memory", "w") as note:
    note.write(checkpointer._channel.welcome.shared_memory)
for step in range(start + 1, 21):
    model(torch.randn(8, 700)).square().mean().backward()
    optimizer.step()
    if step == 10 and start < 10:
        open(os.environ["DIARY"] + ".waits", "w").close()
        while not os.path.exists(os.environ["DIARY"] + ".go"):
            time.sleep(0.01)
    checkpointer.step(loss=0.5)
    if step == 12 and start < 10:
        time.sleep(60)
"""


@pytest.fixture
def memory(diary: Path) -> Iterator[Callable[[], Path]]:
    """The folder in shared memory that the trainer was given."""
    note = Path(f"{diary}.memory")
    yield lambda: Path(note.read_text())
    folder = Path(note.read_text())
    assert folder.is_relative_to("/dev/shm")
    assert not folder.exists(), "nothing is left in shared memory"


@pytest.mark.parametrize("killed", ["the supervisor", "everything"])
def test_what_was_in_memory_when_the_supervisor_died_is_resumed_from(
    machine: Machine, write_job: WriteJob, diary: Path, memory: Callable[[], Path], killed: str
) -> None:
    spec = write_job(SCRIPT, lines=[QUICK])
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: Path(f"{diary}.waits").exists(), 60)
    wait_for(lambda: "step 5 is stored" in machine.output() or list(machine.disk.rglob("step-000000000005")), 60)
    supervisor.send_signal(signal.SIGSTOP)  # it will not bring step 10 to the disk any more
    Path(f"{diary}.go").touch()

    def has_step_10() -> bool:
        return any(slot.step == 10 for path in memory().glob("rank*") if (slot := read_slot(path)) is not None)

    wait_for(has_step_10)
    assert not list(machine.disk.rglob("step-000000000010"))
    if killed == "everything":
        for pid in machine.trainers():
            os.kill(pid, signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    wait_for(machine.has_no_trainer)
    done = machine.run("submit", str(spec), timeout=100)
    assert done.returncode == 0, done.stderr
    assert diary.read_text().splitlines() == ["began at 0", "began at 10"]
    assert machine.status("job")["checkpoint"]["step"] == 20


def test_a_trainer_that_is_killed_goes_on_from_what_was_in_memory(
    machine: Machine, write_job: WriteJob, diary: Path, memory: Callable[[], Path]
) -> None:
    spec = write_job(SCRIPT.replace("time.sleep(60)", "os.kill(os.getpid(), 9)"), lines=[QUICK])
    Path(f"{diary}.go").touch()
    done = machine.run("submit", str(spec), timeout=100)
    assert done.returncode == 0, done.stderr
    assert diary.read_text().splitlines() == ["began at 0", "began at 10"]
    new = [path.name for path in machine.disk.rglob("step-*")]
    assert "step-000000000020" in new
    assert len(new) <= 3


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small shared memory")
def test_where_shared_memory_is_as_small_as_in_a_container_saves_go_to_the_disk(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    """5.6 MiB of state, 4 MiB of /dev/shm."""
    spec = write_job(SCRIPT.replace("time.sleep(60)", "pass"), lines=[QUICK])
    Path(f"{diary}.go").touch()
    inside = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && "$@" && echo "left: $(ls -A /dev/shm)"'
    command = ["unshare", "-m", "sh", "-c", inside, "sh", sys.executable, "-m", "runner", "submit", str(spec)]
    done = subprocess.run(command, env=machine.env, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "MiB are needed" in done.stderr
    assert "checkpoints are written directly" in done.stderr
    assert done.stdout.endswith("left: \n"), "nothing is left there"
    assert diary.read_text().splitlines() == ["began at 0"]
    assert machine.status("job")["checkpoint"]["step"] == 20
