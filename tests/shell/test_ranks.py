"""Who gets the stop signal: the processes that train, and nobody beside them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.supervisor import guard

RANK_MARKS = ("rank0.ready", "rank1.ready", "rank0-worker.ready", "rank1-worker.ready")


@pytest.mark.parametrize(
    ("command_line", "program"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/venv/bin/python /venv/bin/torchrun train.py", "torchrun"),
        ("python3.11 -u -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python -X dev -W ignore -m torch.distributed.launch train.py", "torch.distributed.launch"),
        ("/usr/bin/python3 /usr/bin/accelerate launch train.py", "accelerate"),
        ("python -u -m deepspeed.launcher.launch --world_info=x train.py", "deepspeed.launcher.launch"),
        ("-bash", "bash"),
        ("python train.py --launcher torchrun", "train.py"),
        ("python -c pass torchrun", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_what_a_command_line_runs(command_line: str, program: str) -> None:
    assert guard.program(command_line.split()) == program


def test_everything_below_a_process() -> None:
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 5}
    table = {pid: guard.Process(parent, "S", pid) for pid, parent in parents.items()}
    assert guard.descendants(1, table) == [2, 5, 3, 6, 4]
    assert guard.descendants(4, table) == []


def fake_launcher(stage: Any, name: str) -> list[str]:
    """A launcher with the name of a real one, two ranks, and a worker below each rank."""
    launcher = stage.folder / name
    launcher.symlink_to(Path(__file__).parent / "children" / "child.py")
    return [sys.executable, str(launcher), "launch", str(stage.folder)]


def assert_only_ranks_heard(stage: Any, name: str) -> None:
    assert stage.has(f"rank0.{name}")
    assert stage.has(f"rank1.{name}")
    assert not stage.has(f"launcher.{name}")
    assert not stage.has(f"rank0-worker.{name}")


def test_ranks_of_a_launcher(stage: Any) -> None:
    trainer = stage.start(fake_launcher(stage, "torchrun"))
    stage.await_mark(*RANK_MARKS)
    trainer.signal(signal.SIGUSR1)
    stage.await_mark("rank0.SIGUSR1", "rank1.SIGUSR1")
    trainer.signal(signal.SIGTERM)
    ended = trainer.wait(timeout=15)
    assert ended.returncode == 0
    assert_only_ranks_heard(stage, "SIGUSR1")
    assert stage.has("rank0.SIGTERM")
    assert not stage.has("launcher.SIGTERM")


def test_ranks_of_a_launcher_in_a_script_whose_output_is_piped(stage: Any) -> None:
    (stage.folder / "job.sh").write_text(f"{' '.join(fake_launcher(stage, 'accelerate'))} 2>&1 | tee copy\ntrue\n")
    trainer = stage.start(["bash", "job.sh"])
    stage.await_mark(*RANK_MARKS)
    trainer.signal(signal.SIGTERM)
    trainer.wait(timeout=15)
    assert stage.has("rank0.SIGTERM")
    assert stage.has("rank1.SIGTERM")
    assert not stage.has("launcher.SIGTERM")


def test_unknown_parents_are_trainers_themselves(stage: Any) -> None:
    trainer = stage.start(fake_launcher(stage, "train.py"))
    stage.await_mark(*RANK_MARKS)
    trainer.signal(signal.SIGUSR1)
    stage.await_mark("launcher.SIGUSR1")
    assert not stage.has("rank0.SIGUSR1")


def test_script_of_a_shell(stage: Any) -> None:
    trainer = stage.start(["sh", "-c", f"{' '.join(stage.child('record'))}; exit 3"])
    stage.await_mark("leader.ready", "leader-worker.ready")
    trainer.signal(signal.SIGTERM)
    assert trainer.wait(timeout=10).returncode == 3
    assert stage.has("leader.SIGTERM")


def test_launcher_without_ranks_yet_stands_for_them(stage: Any) -> None:
    (stage.folder / "torchrun").write_text("import time; print('up', flush=True); time.sleep(60)")
    trainer = stage.start([sys.executable, "torchrun"])
    stage.until(lambda: stage.output() == "up\n", within=10)
    trainer.signal(signal.SIGTERM)
    assert trainer.wait(timeout=5).returncode == -signal.SIGTERM


def test_real_torchrun(stage: Any) -> None:
    rank = stage.folder / "rank.py"
    child = Path(__file__).parent / "children" / "child.py"
    rank.write_text(
        "import os, sys\n"
        f"sys.argv = ['child.py', 'record', {str(stage.folder)!r}, 'rank' + os.environ['RANK']]\n"
        f"exec(compile(open({str(child)!r}).read(), 'child.py', 'exec'))\n"
    )
    torchrun = Path(sys.executable).with_name("torchrun")
    trainer = stage.start([str(torchrun), "--standalone", "--nproc-per-node", "2", str(rank)])
    stage.await_mark(*RANK_MARKS, within=60)
    trainer.signal(signal.SIGTERM)
    ended = trainer.wait(timeout=30)
    assert ended.returncode == 0, stage.output()
    assert stage.has("rank0.SIGTERM")
    assert stage.has("rank1.SIGTERM")
