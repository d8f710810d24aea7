"""The trainer's life and death, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.supervisor.guard import processes
from runner.supervisor.trainer import Exit, Trainer

CHILDREN = Path(__file__).parent / "children"
TWO_SECONDS = 2.0


def test_good_trainer_ends_with_0(stage: Any) -> None:
    trainer = stage.start(stage.child("good"))
    assert trainer.wait(timeout=10) == Exit(returncode=0)
    assert stage.output() == "step 1/2\nstep 2/2\n"


def test_crash_is_an_exit_code_and_the_traceback_is_in_the_log(stage: Any) -> None:
    trainer = stage.start(stage.child("crash"))
    assert trainer.wait(timeout=10) == Exit(returncode=1)
    assert "RuntimeError: a bug in the training script" in stage.output()


def test_death_by_a_signal_is_a_negative_code(stage: Any) -> None:
    trainer = stage.start(["sh", "-c", "kill -SEGV $$"])
    assert trainer.wait(timeout=10) == Exit(returncode=-signal.SIGSEGV)


def test_wait_says_when_it_gives_up(stage: Any) -> None:
    trainer = stage.start(["sleep", "60"])
    with pytest.raises(TimeoutError):
        trainer.wait(timeout=0.1)
    trainer.kill()
    assert trainer.wait(timeout=5) == Exit(returncode=-signal.SIGKILL)


def test_late_saver_gets_its_time(stage: Any) -> None:
    trainer = stage.start(stage.child("late"))
    stage.await_mark("ready")
    assert trainer.signal(signal.SIGTERM)
    assert trainer.wait(timeout=10) == Exit(returncode=0)
    assert stage.has("saved")


def test_deaf_trainer_is_killed(stage: Any) -> None:
    trainer = stage.start(stage.child("deaf"))
    stage.await_mark("ready")
    trainer.signal(signal.SIGTERM)
    trainer.signal(signal.SIGTERM, to="group")
    with pytest.raises(TimeoutError):
        trainer.wait(timeout=0.3)
    trainer.kill()
    assert trainer.wait(timeout=5).returncode == -signal.SIGKILL
    assert not stage.living()


def test_kill_ends_deaf_daemons_too(stage: Any) -> None:
    trainer = stage.start(stage.child("daemons"))
    stage.await_mark("ready")
    assert len(stage.living()) == 4
    trainer.kill()
    assert trainer.wait(timeout=5) == Exit(returncode=-signal.SIGKILL)
    assert not stage.living()


def test_daemons_do_not_outlive_a_trainer_that_ends_by_itself(stage: Any) -> None:
    trainer = stage.start(stage.child("daemons", "exit"))
    assert trainer.wait(timeout=10) == Exit(returncode=0)
    assert not stage.living()


def test_daemon_that_forks_all_the_time_does_not_escape(stage: Any) -> None:
    trainer = stage.start(stage.child("hopper"))
    ended = trainer.wait(timeout=15)
    assert (ended.returncode, ended.stuck) == (0, ())
    assert not stage.living()


def test_group_signal_reaches_workers(stage: Any) -> None:
    trainer = stage.start(stage.child("record"))
    stage.await_mark("leader.ready", "leader-worker.ready")
    trainer.signal(signal.SIGUSR1, to="group")
    stage.await_mark("leader.SIGUSR1", "leader-worker.SIGUSR1")


def test_signal_for_a_dead_trainer_is_no_error(stage: Any) -> None:
    trainer = stage.start(["true"])
    trainer.wait(timeout=10)
    assert not trainer.signal(signal.SIGTERM)
    trainer.kill()
    assert trainer.wait().returncode == 0


# --- what a trainer starts with ---


# Signals 32 and 33 belong to the C library: no program can set them, and some environments hand them on ignored.
OF_THE_C_LIBRARY = 0b11 << 31


def test_trainer_starts_with_default_signals(stage: Any) -> None:
    stage.start(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]).wait(timeout=10)
    assert {int(line.split()[1], 16) & ~OF_THE_C_LIBRARY for line in stage.output().splitlines()} == {0}


def test_nohup_is_kept_and_nothing_else(stage: Any) -> None:
    command = [sys.executable, str(CHILDREN / "supervise.py"), str(stage.folder), "grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run(["nohup", *command], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("SigIgn")]
    assert int(line.split()[1], 16) & ~OF_THE_C_LIBRARY == 1 << (signal.SIGHUP - 1)


def test_trainer_inherits_no_file_and_reads_nothing(stage: Any) -> None:
    with (stage.folder / "leaked").open("wb") as leaked:
        os.set_inheritable(leaked.fileno(), True)
        stage.start(["sh", "-c", "readlink /proc/self/fd/0; ls /proc/$$/fd"]).wait(timeout=10)
    assert stage.output().split() == ["/dev/null", "0", "1", "2"]


def test_trainer_leads_a_session_in_its_folder_with_its_environment(stage: Any) -> None:
    trainer = stage.start(
        ["sh", "-c", 'echo $(($(ps -o sid= -p $$) == $$)) "$PWD" "$(env | grep -c .)" "$ODD"'],
        env={"ODD": "a\udcffb", "PATH": os.environ["PATH"], "PWD": "/"},
    )
    trainer.wait(timeout=10)
    assert stage.log.read_bytes() == b"1 %s 3 a\xffb\n" % str(stage.folder).encode()


# --- what cannot start ---


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["no-such-program"], "cannot run no-such-program: No such file or directory"),
        (["/no/such/program"], "cannot run /no/such/program: No such file or directory"),
        (["./plain.txt"], "cannot run ./plain.txt: Permission denied"),
        (["./lost.sh"], "cannot run ./lost.sh: the interpreter that its first line names does not exist"),
        (["./words"], "cannot run ./words: neither a program nor a script that begins with #!"),
        ([], "the command is empty"),
        (["a\0b"], "cannot run a\0b: "),
        (["true", "x" * 4_000_000], "cannot run true: Argument list too long"),
    ],
)
def test_command_that_cannot_run(stage: Any, argv: list[str], why: str) -> None:
    (stage.folder / "plain.txt").write_text("text")
    for name, text in (("lost.sh", "#!/no/such/shell\n"), ("words", "just words\n")):
        (stage.folder / name).write_text(text)
        (stage.folder / name).chmod(0o755)
    ended = stage.start(argv).wait(timeout=10)
    assert ended.returncode is None
    assert ended.spawn_error.startswith(why)


def test_folder_that_does_not_exist(stage: Any) -> None:
    ended = stage.start(["true"], cwd="/no/such/folder").wait(timeout=10)
    assert ended == Exit(
        None, spawn_error="cannot enter the working directory /no/such/folder: No such file or directory"
    )


# --- when one of ours is killed ---


@pytest.fixture
def supervised(stage: Any) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, with a deaf trainer and its daemons."""
    process = subprocess.Popen(
        [sys.executable, str(CHILDREN / "supervise.py"), str(stage.folder), *stage.child("daemons")],
        stdout=subprocess.PIPE,
        text=True,
    )
    stage.await_mark("ready", "guard")
    return process


def guard_of(stage: Any) -> int:
    return int((stage.folder / "guard").read_text())


def is_alive(pid: int) -> bool:
    return (process := processes().get(pid)) is not None and process.state != "Z"


def test_kill_9_of_the_supervisor_leaves_nothing(stage: Any, supervised: subprocess.Popen[str]) -> None:
    supervised.kill()
    supervised.wait()
    stage.until(lambda: not stage.living() and not is_alive(guard_of(stage)), within=TWO_SECONDS)


def test_kill_9_of_the_guard_is_an_exit_and_leaves_nothing(stage: Any, supervised: subprocess.Popen[str]) -> None:
    os.kill(guard_of(stage), signal.SIGKILL)
    assert supervised.stdout is not None
    ended = json.loads(supervised.stdout.readline())
    assert ended["returncode"] == -signal.SIGKILL
    assert supervised.wait(timeout=5) == 0
    assert not stage.living()


def test_guard_takes_no_signal_of_the_terminal(stage: Any, supervised: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(guard_of(stage), number)
    time.sleep(0.1)
    assert len(stage.living()) == 5, "the trainer, three daemons and the supervisor"
    supervised.kill()
    supervised.wait()
    stage.until(lambda: not stage.living(), within=TWO_SECONDS)


def test_guard_that_hangs_does_not_hold_up_a_kill(stage: Any) -> None:
    script = (
        "import os, signal, sys, time\n"
        "from runner.supervisor.guard import processes\n"
        "from runner.supervisor.trainer import Trainer\n"
        "trainer = Trainer(sweep_within=0.5)\n"
        "trainer.start(sys.argv[1:], env=dict(os.environ), cwd='/', output_fd=2)\n"
        "guard, = [pid for pid, process in processes().items() if process.parent == os.getpid()]\n"
        "os.kill(guard, signal.SIGSTOP)\n"
        "trainer.kill()\n"
        "print(trainer.wait(timeout=10))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *stage.child("deaf")], stdout=subprocess.PIPE, text=True, timeout=20, check=True
    )
    assert done.stdout.strip() == repr(Exit(-signal.SIGKILL))
    assert not stage.living()


# --- as PID 1 ---


@pytest.mark.root
def test_pid_1_reaps_orphans_and_steals_no_exit_code(stage: Any) -> None:
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, str(CHILDREN / "init.py"), str(stage.folder)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["zombies"] == 300
    assert result == {"zombies": 300, "reaped": 300, "codes": [7], "others": 0}


def test_trainer_that_was_never_started_can_be_killed() -> None:
    Trainer().kill()
