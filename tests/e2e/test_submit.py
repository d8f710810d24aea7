"""The real command line, from the first submit to the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.machine import Machine, wait_for
from tests.e2e.trainers import CRASHES, DEAF_WITH_DAEMONS, PRELUDE, SAVES_ON_SIGTERM, STEADY

WriteJob = Callable[..., Path]
QUICK = ("restart: {backoff: {first: 50ms, limit: 100ms}}", "checkpoints: {every: 100ms}")


def test_a_job_that_finishes(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY, lines=[*QUICK, "price: {per_hour: 3.6, on_demand_per_hour: 36}"])
    done = machine.run("submit", str(spec))
    assert done.returncode == 0, done.stderr
    assert "step 5/5" in done.stdout, "the trainer's output is shown live"
    assert "done: the trainer finished" in done.stderr
    told = machine.status("job")
    assert told["phase"] == "finished"
    assert (told["outcome"], told["exit_code"], told["step"], told["attempt"]) == ("succeeded", 0, 5, 1)
    assert told["checkpoint"]["step"] == 5
    assert told["checkpoint"]["lag_bytes"] == 0
    assert told["cost"]["currency"] == "USD"
    assert told["cost"]["saved"] == pytest.approx(9 * told["cost"]["spent"])
    again = machine.run("submit", str(spec))
    assert again.returncode == 0
    assert diary.read_text().splitlines() == ["began at 0", "finished"], "a finished run is not trained again"


def test_what_lies_in_the_store_is_plain_files(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    run = machine.store / "job/run-1"
    assert (run / "job.yaml").read_text() == spec.read_text()
    assert (run / "DONE").exists()
    assert (machine.store / "job/status.json").exists()
    newest = max((run / "checkpoints").iterdir())
    assert newest.name.startswith("step-000000000005.a1-")
    manifest = json.loads((newest / "cloudrun-manifest.json").read_text())
    assert manifest["step"] == 5
    assert [file["path"] for file in manifest["files"]] == ["step-5.pt"]
    assert (newest / "step-5.pt").exists()
    assert b"step 5/5" in next((run / "logs").glob("a1-*/000001.log")).read_bytes()
    lines = next((run / "journal").glob("a1-*.jsonl.d/000001")).read_text().splitlines()
    assert json.loads(lines[0])["event"]["type"] == "Started"
    assert json.loads(lines[-1])["state"]["phase"] == "finished"


def test_a_trainer_that_always_fails(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(CRASHES, lines=QUICK)
    failed = machine.run("submit", str(spec))
    assert failed.returncode == 70
    assert failed.stderr.count("RuntimeError: no such layer") == 3, "the last lines of each attempt are told"
    assert "error: 3 attempt(s) in a row added no checkpoint" in failed.stderr
    told = machine.status("job")
    assert told["last_stop"] == {"cause": "crashed", "reason": "exit code 1", "code": 1}
    assert told["restarts"]["fruitless"] == 3


@pytest.mark.parametrize(
    ("number", "code", "outcome"), [(signal.SIGTERM, 75, "preempted"), (signal.SIGINT, 130, "stopped")]
)
def test_asked_to_leave_by_a_signal(
    machine: Machine, write_job: WriteJob, diary: Path, number: int, code: int, outcome: str
) -> None:
    spec = write_job(SAVES_ON_SIGTERM, lines=QUICK)
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: "step 3" in machine.output())
    supervisor.send_signal(number)
    assert supervisor.wait(20) == code, machine.output()
    told = machine.status("job")
    assert told["outcome"] == outcome
    saved = int(diary.read_text().split("saved ")[1].split()[0])
    assert told["checkpoint"]["step"] == saved, "the save on the signal is stored"
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: f"began at {saved}" in diary.read_text())
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(20) == 75


def test_stop_from_another_process(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(SAVES_ON_SIGTERM, lines=QUICK)
    started = machine.run("submit", str(spec), "--detach")
    assert started.returncode == 0, started.stderr
    wait_for(lambda: machine.status("job")["step"])
    told = machine.status("job")
    assert told["phase"] == "running"
    assert told["alive"] is True
    second = machine.run("submit", str(spec))
    assert second.returncode == 64
    assert "running on this machine already" in second.stderr
    stopped = machine.run("stop", str(spec))
    assert stopped.returncode == 0, stopped.stderr
    told = machine.status("job")
    assert (told["outcome"], told["exit_code"]) == ("stopped", 143)
    assert machine.run("stop", "job").returncode == 64, "nothing runs any more"


def test_a_deaf_trainer_and_its_daemons_are_gone_after_a_stop(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    spec = write_job(DEAF_WITH_DAEMONS, lines=[*QUICK, "stop: {grace: 1s}"])
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: len(machine.trainers()) == 4)
    supervisor.terminate()
    assert supervisor.wait(20) == 75
    assert machine.trainers() == []


def test_killing_the_supervisor_leaves_nothing_of_the_trainer(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    spec = write_job(DEAF_WITH_DAEMONS, lines=QUICK)
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: len(machine.trainers()) == 4)
    supervisor.kill()
    wait_for(machine.has_no_trainer, 2.0)


def test_a_second_request_does_not_wait(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(DEAF_WITH_DAEMONS, lines=[*QUICK, "stop: {grace: 10m}"])
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: len(machine.trainers()) == 4)
    supervisor.send_signal(signal.SIGINT)
    wait_for(lambda: "asked to leave" in machine.output())
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(15) == 130
    assert machine.trainers() == []


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "missing"])
def test_a_bad_newest_checkpoint_is_passed_over(
    machine: Machine, write_job: WriteJob, diary: Path, damage: str
) -> None:
    machine.extra |= {"STEPS": "1000"}
    spec = write_job(STEADY, lines=QUICK)
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: len(committed(machine)) >= 3)
    # Asked to leave, it releases its lease: another machine need not wait for it to expire.
    supervisor.terminate()
    assert supervisor.wait(30) == 75
    machine.wipe()
    newest, before = sorted(committed(machine), reverse=True)[:2]
    spoil(next(newest.glob("step-*.pt")), damage)
    supervisor = machine.start("submit", str(spec))
    expected = int(before.name[5:17])
    wait_for(lambda: f"began at {expected}" in diary.read_text())
    told = machine.status("job")
    assert [rejected["id"] for rejected in told["rejected"]] == [newest.name]
    assert told["rejected"][0]["reason"]
    assert told["resumed_from"]["id"] == before.name


def committed(machine: Machine) -> list[Path]:
    return [path.parent for path in (machine.store / "job/run-1/checkpoints").glob("*/cloudrun-manifest.json")]


def spoil(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    else:
        data[200] ^= 1
        path.write_bytes(data)


def test_when_no_checkpoint_is_usable_nothing_starts_from_zero(
    machine: Machine, write_job: WriteJob, diary: Path
) -> None:
    spec = write_job(SAVES_ON_SIGTERM, lines=QUICK)
    supervisor = machine.start("submit", str(spec))
    wait_for(lambda: "step 3" in machine.output())
    supervisor.terminate()
    assert supervisor.wait(20) == 75
    machine.wipe()
    for checkpoint in committed(machine):
        spoil(next(checkpoint.glob("*.pt")), "truncated")
    refused = machine.run("submit", str(spec))
    assert refused.returncode == 70
    assert "none is usable" in refused.stderr
    assert "--fresh" in refused.stderr
    assert diary.read_text().count("began at") == 1
    supervisor = machine.start("submit", str(spec), "--fresh")
    wait_for(lambda: diary.read_text().count("began at 0") == 2)
    supervisor.terminate()
    assert supervisor.wait(20) == 75
    assert machine.status("job")["run"] == 2


def test_saved_but_not_stored_work_is_used_from_the_disk(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    machine.extra |= {"STEPS": "1000"}
    spec = write_job(STEADY, lines=["checkpoints: {every: 1h}"])
    supervisor = machine.start("submit", str(spec))
    stored = int(wait_for(lambda: committed(machine))[0].name[5:17])
    wait_for(lambda: f"step {stored + 40}/" in machine.output())
    supervisor.kill()
    supervisor.wait()
    assert len(committed(machine)) == 1
    machine.start("submit", str(spec))
    wait_for(lambda: diary.read_text().count("began") == 2)
    assert int(diary.read_text().split()[-1]) >= stored + 40


def test_secrets_are_nowhere(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    secret = 'hunter2-Zk93"quoted'
    machine.extra |= {"API_KEY": secret}
    script = PRELUDE + "print('key is', os.environ['API_KEY'], flush=True)\nraise RuntimeError(os.environ['API_KEY'])\n"
    spec = write_job(script, lines=["secrets: [API_KEY]", "restart: {max_without_progress: 1}"])
    failed = machine.run("submit", str(spec))
    assert failed.returncode == 70
    assert "key is ***" in failed.stdout
    everything = failed.stdout + failed.stderr + machine.run("status", "job").stdout + machine.run("logs", "job").stdout
    for place in (machine.disk, machine.store):
        for path in place.rglob("*"):
            if path.is_file():
                everything += path.read_text(errors="replace")
    assert secret not in everything
    assert json.dumps(secret)[1:-1] not in everything


def test_script_setup_and_environment(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job("", lines=QUICK)
    (spec.parent / "extra.env").write_text("FROM_FILE=yes\n")
    text = spec.read_text().replace("command: python train.py", 'script: |\n  echo "${FROM_FILE} $MODE $TMPDIR" > out')
    text += "setup: echo once >> $DIARY\nenv_file: extra.env\nenv: {MODE: fast}\n"
    spec.write_text(text)
    assert machine.run("submit", str(spec)).returncode == 0
    words = (spec.parent / "out").read_text().split()
    assert words[:2] == ["yes", "fast"]
    assert Path(words[2]).is_dir()
    assert machine.run("submit", str(spec), "--fresh").returncode == 0
    assert diary.read_text() == "once\n", "setup runs once per machine"
    spec.write_text(text.replace("echo once", "echo twice"))
    assert machine.run("submit", str(spec), "--fresh").returncode == 0
    assert diary.read_text() == "once\ntwice\n"


def test_dry_run_changes_nothing(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY)
    plan = machine.run("submit", str(spec), "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "job, run 1 (new)" in plan.stdout
    assert not machine.store.exists()
    assert not diary.read_text()


def test_a_feature_that_is_not_there_yet_is_refused(machine: Machine, write_job: WriteJob) -> None:
    spec = write_job(STEADY, lines=["nodes: {min: 2, max: 2}"])
    refused = machine.run("submit", str(spec))
    assert refused.returncode == 78
    assert "nodes" in refused.stderr
    assert "not in this version yet" in refused.stderr


def test_logs_of_attempts_here_and_from_the_store(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    script = PRELUDE + "print('life', os.environ['CLOUDRUN_ATTEMPT'], flush=True)\nsave(step + 1)\nsys.exit(step < 2)\n"
    spec = write_job(script, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    assert machine.run("logs", "job").stdout == "life 3\n"
    assert machine.run("logs", "job", "--attempt", "2").stdout == "life 2\n"
    machine.wipe()
    assert machine.run("logs", str(spec), "--all").stdout == "life 1\nlife 2\nlife 3\n"
    assert machine.run("logs", str(spec), "--attempt", "9").returncode == 64


def test_following_the_log_ends_with_the_job(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    machine.extra |= {"PAUSE": "0.5"}
    machine.start("submit", str(spec))
    wait_for(lambda: "step 1/" in machine.output())
    followed = machine.run("logs", "-f", "job")
    assert [f"step {n}/5" for n in range(1, 6)] == [line for line in followed.stdout.splitlines() if line]


def test_checkpoint_commands(machine: Machine, write_job: WriteJob, diary: Path, tmp_path: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    rows = json.loads(machine.run("checkpoints", "ls", "job", "--json").stdout)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows}, reverse=True)
    assert rows[0]["step"] == 5
    assert set(rows[0]) >= {"id", "step", "attempt", "run", "path", "files", "bytes", "committed_at", "kept_because"}
    assert machine.run("checkpoints", "verify", "job").returncode == 0
    pulled = machine.run("checkpoints", "pull", "job", "--to", str(tmp_path / "out"))
    assert Path(pulled.stdout.strip()) == tmp_path / "out/step-5.pt"
    newest = max(committed(machine))
    spoil(newest / "step-5.pt", "bit flipped")
    bad = machine.run("checkpoints", "verify", "job", "--json")
    assert bad.returncode == 70
    assert json.loads(bad.stdout)[0]["problems"]
    older = machine.run("checkpoints", "pull", "job", "--to", str(tmp_path / "out2"))
    assert older.returncode == 0
    assert "step-5.pt" not in older.stdout
    assert machine.run("checkpoints", "rm", "job", "--step", "5", "--yes").returncode == 0
    assert not newest.exists() or not any(newest.iterdir())
    assert machine.run("checkpoints", "rm", "job", "--step", "99", "--yes").returncode == 64


def test_the_trainer_is_back_within_a_second(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    """A sanity bound only; scripts/bench/restart.py measures."""
    machine.extra |= {"STEPS": "1000"}
    spec = write_job(STEADY, lines=QUICK)
    machine.start("submit", str(spec))
    wait_for(lambda: "step 5/" in machine.output())
    os.kill(machine.trainers()[0], signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: diary.read_text().count("began") == 2)
    assert time.monotonic() - began < 10


def test_all_jobs_of_a_machine_at_once(machine: Machine, write_job: WriteJob, diary: Path) -> None:
    spec = write_job(STEADY, lines=QUICK)
    assert machine.run("submit", str(spec)).returncode == 0
    (told,) = json.loads(machine.run("status", "--json").stdout)
    assert (told["job"], told["phase"], told["step"]) == ("job", "finished", 5)
    assert machine.run("status").stdout.startswith("job: succeeded")


def test_a_place_that_cannot_be_written_is_told_with_what_to_look_at(machine: Machine, write_job: WriteJob) -> None:
    spec = write_job(STEADY)
    machine.extra["XDG_STATE_HOME"] = "/proc/nowhere"
    failed = machine.run("submit", str(spec))
    assert failed.returncode == 70
    assert failed.stderr.splitlines()[-2:] == [
        "error: /proc/nowhere: No such file or directory",
        "hint: may this user write there, and is there room? HOME, XDG_STATE_HOME and cache.dir say where things go",
    ]
