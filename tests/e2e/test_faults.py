"""Faults, on purpose, seen through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.machine import Machine, wait_for
from tests.e2e.trainers import PRELUDE, SAVES_ON_SIGTERM, STEADY

WriteJob = Callable[..., Path]
QUICK = ("restart: {backoff: {first: 50ms, limit: 100ms}}", "checkpoints: {every: 100ms}")


@pytest.mark.parametrize("away", ["not mounted", "no folder"])
def test_while_the_store_is_away_this_machine_answers_for_itself(
    machine: Machine, write_job: WriteJob, diary: Path, away: str
) -> None:
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    before = machine.status("job")
    machine.store.rename(machine.store.with_name("elsewhere"))
    if away == "no folder":
        machine.store.write_text("what is this")
    told = machine.status("job")
    assert {key: told[key] for key in ("phase", "step", "run")} == {
        key: before[key] for key in ("phase", "step", "run")
    }
    shown = machine.run("logs", "job")
    assert "step 5/5" in shown.stdout
    assert shown.stderr.count("the store cannot be asked") == (away == "no folder"), "a word of it, once"
    assert "job: succeeded" in machine.run("status").stdout
    refused = machine.run("submit", str(spec))
    assert refused.returncode == 69, "an empty mount point is no new job"
    assert diary.read_text().count("began") == 1


def test_a_fresh_run_after_the_store_was_emptied_begins_at_0(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    shutil.rmtree(machine.store)
    plan = machine.run("submit", str(spec), "--dry-run", "--fresh")
    assert "job, run 2 (new)" in plan.stdout
    assert machine.run("submit", str(spec), "--fresh").returncode == 0
    assert diary.read_text().splitlines() == ["began at 0", "finished"] * 2


def test_signals_while_it_leaves_do_not_change_how_it_ended(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(SAVES_ON_SIGTERM, lines=QUICK)
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: "step 3" in machine.output())
    supervisor.send_signal(signal.SIGTERM)
    while supervisor.poll() is None:
        time.sleep(0.05)
        if "leaving:" in machine.output():
            supervisor.send_signal(signal.SIGINT)
    assert supervisor.returncode == 75, machine.output()


def test_a_job_in_the_background_that_ends_at_once_says_how(
    machine: Machine, write_job: WriteJob, diary: Path, tmp_path: Path
) -> None:
    spec = write_job(PRELUDE + "raise SystemExit(3)\n", lines=["restart: {max_without_progress: 1}"])
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner/__init__.py").write_text("raise RuntimeError('a folder of the owner')")
    command = [sys.executable, "-P", "-m", "runner", "submit", str(spec), "--detach"]
    started = subprocess.run(command, env=machine.env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "a folder of the owner" not in started.stderr
    wait_for(lambda: machine.status("job")["phase"] == "finished")
    told = machine.status("job")
    assert (told["outcome"], told["exit_code"]) == ("failed", 70)


def test_status_asked_all_the_time_keeps_nobody_from_starting(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    """Whoever asks whether a job runs holds its lock for a moment."""
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    path = next((machine.disk / "state/cloudrun/jobs").glob("job@*")) / "lock"
    code = (
        "import fcntl, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "while True:\n"
        "    for how in fcntl.LOCK_EX, fcntl.LOCK_UN:\n"
        "        fcntl.flock(fd, how)\n"
        "        time.sleep(0.02)\n"
    )
    pest = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        for _ in range(3):
            again = machine.run("submit", str(spec))
            assert again.returncode == 0, again.stderr
    finally:
        pest.kill()
        pest.wait()


def test_a_job_elsewhere_is_not_called_dead(machine: Machine, write_job: WriteJob, diary: Path, tmp_path: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    machine.extra |= {"STEPS": "1000"}
    machine.start("submit", str(spec))
    wait_for(lambda: (machine.store / "job/status.json").exists() and "step 3/" in machine.output())
    journal = next((machine.store / "job/run-1/journal").glob("*/000001"))
    wait_for(lambda: b'"TrainerStarted"' in journal.read_bytes())
    elsewhere = Machine(tmp_path / "elsewhere", tmp_path / "copy")
    for path in machine.store.rglob("*"):  # as another host would have written it
        if path.is_file():
            copy = tmp_path / "copy" / path.relative_to(machine.store)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes().replace(f'"host":"{os.uname().nodename}"'.encode(), b'"host":"gpu-9"'))
    other = tmp_path / "other.yaml"
    other.write_text(spec.read_text().replace(str(machine.store), str(elsewhere.store)))
    told = json.loads(elsewhere.run("status", str(other), "--json").stdout)
    assert (told["phase"], told["alive"], told["host"]) == ("running", None, "gpu-9")
    assert "vanished" not in elsewhere.run("status", str(other)).stdout


def test_a_secret_that_looks_like_a_number_spoils_no_record(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    """Part of every time of day, for the years to come."""
    secret = str(int(time.time()))[:4]
    machine.extra |= {"PIN": secret}
    spec = write_job(STEADY + "print('pin', os.environ['PIN'])\n", lines=[*QUICK, "secrets: [PIN]"])
    assert machine.run("submit", str(spec)).returncode == 0
    assert "pin ***" in machine.run("logs", "job").stdout
    told = machine.status("job")
    assert (told["phase"], told["step"], told["attempt"]) == ("finished", 5, 1)


def test_a_name_that_is_no_text_ends_nothing(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    argument = b"caf\xe9".decode("utf-8", "surrogateescape")
    machine.extra |= {"ODD": argument}
    spec.write_text(spec.read_text().replace("python train.py", "python train.py ${ODD}"))
    done = machine.run("submit", str(spec))
    assert done.returncode == 0, done.stderr
    assert machine.status("job")["phase"] == "finished"
