"""What the trainer sees."""

from __future__ import annotations

from pathlib import Path

from runner.launch.environment import Place, command_line, trainer_environment


def place(**changes: object) -> Place:
    facts: dict[str, object] = {
        "job": "job", "store_url": "file:///s", "run": 2, "attempt": 7, "data_dir": Path("/d"),
        "checkpoint_dir": Path("/c"), "stop_file": Path("/stop"), "tmp_dir": Path("/t"), "resume_path": "",
        "resume_step": None, "threads": "4",
    }  # fmt: skip
    return Place(**{**facts, **changes})  # type: ignore[arg-type]


def test_our_variables_cannot_be_overridden_and_our_defaults_can() -> None:
    own = {"CLOUDRUN_RUN": "99", "OMP_NUM_THREADS": "1", "TMPDIR": "/mine", "X": "spec"}
    env = trainer_environment({"X": "outside", "HOME": "/root"}, own, place())
    assert (env["CLOUDRUN_RUN"], env["CLOUDRUN_JOB"], env["CLOUDRUN_ATTEMPT"]) == ("2", "job", "7")
    assert (env["OMP_NUM_THREADS"], env["TMPDIR"], env["X"], env["HOME"]) == ("1", "/mine", "spec", "/root")
    env = trainer_environment({}, {}, place())
    assert (env["OMP_NUM_THREADS"], env["TMPDIR"], env["PYTHONUNBUFFERED"]) == ("4", "/t", "1")
    assert (env["CLOUDRUN_RESUME_FROM"], env["CLOUDRUN_RESUME_STEP"]) == ("", "")
    assert env["CLOUDRUN_STOP_FILE"] == "/stop"


def test_what_is_meant_for_the_supervisor_alone_is_not_passed_on() -> None:
    assert "NOTIFY_SOCKET" not in trainer_environment({"NOTIFY_SOCKET": "/run/systemd"}, {}, place())


def test_trackers_keep_one_identity_per_run_not_per_attempt_or_machine() -> None:
    one = trainer_environment({}, {}, place())
    again = trainer_environment({}, {}, place(attempt=8, tmp_dir=Path("/other")))
    other_run, other_store = (
        trainer_environment({}, {}, place(**change)) for change in ({"run": 3}, {"store_url": ""})
    )
    for name in ("WANDB_RUN_ID", "MLFLOW_RUN_ID"):
        assert one[name] == again[name]
        assert len({one[name], other_run[name], other_store[name]}) == 3


def test_resume_arguments_only_where_there_is_something_to_resume() -> None:
    argv, resume = ("python", "train.py"), ("--resume={path}", "--from", "{step}")
    assert command_line(argv, resume, place()) == ["python", "train.py"]
    there = place(resume_path="/c/step-5.pt", resume_step=5)
    assert command_line(argv, resume, there) == ["python", "train.py", "--resume=/c/step-5.pt", "--from", "5"]
