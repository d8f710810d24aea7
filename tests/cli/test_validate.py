"""``cloudrun validate`` as people and programs call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GOOD = "name: digits\ncommand: python3 train.py\n"


def validate(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", "validate", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def write(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    (folder / "train.py").touch()


def test_a_good_spec_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    done = validate(tmp_path, "job.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "job.yaml is valid: digits, python3 train.py\n", "")


def test_all_problems_with_their_hints(tmp_path: Path) -> None:
    write(tmp_path, "name: 2024\ncommand: x\nstop:\n  grase: 3s\n")
    done = validate(tmp_path, "job.yaml")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.splitlines() == [
        "error: job.yaml:1:7: name: must be text, not '2024'",
        'hint: put it in quotes, such as name: "2024"',
        "error: job.yaml:4:3: stop.grase: unknown key, did you mean stop.grace?",
    ]


def test_what_comes_later_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path, f"{GOOD}logs: {{keep: 3}}\n")
    done = validate(tmp_path, "job.yaml")
    assert done.returncode == 0
    assert done.stdout == "job.yaml is valid: digits, python3 train.py\n"
    assert done.stderr.startswith("warning: job.yaml:3:14: logs.keep: this key is not in this version yet\nhint: ")


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    write(tmp_path, f"{GOOD}logs: {{keep: 3}}\n")
    done = validate(tmp_path, "job.yaml", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (told["valid"], told["errors"], told["warnings"][0]["key"]) == (True, [], "logs.keep")
    assert "exit_code" not in told["warnings"][0]
    done = validate(tmp_path, "job.yaml", "--json", "--set", "restart.backof=3")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["valid"]) == (78, "", False)
    assert told["errors"] == [
        {
            "file": "--set",
            "line": 1,
            "column": 1,
            "key": "restart.backof",
            "message": "unknown key, did you mean restart.backoff?",
            "hint": "",
            "exit_code": 78,
        }
    ]


def test_what_the_machine_lacks_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "name: a\ncommand: no-such-program\n")
    done = validate(tmp_path, "job.yaml")
    assert done.returncode == 78
    assert "error: job.yaml:2:10: command: there is no program no-such-program here" in done.stderr


def test_online_looks_into_the_stores(tmp_path: Path) -> None:
    write(tmp_path, f"{GOOD}data: [{{source: 'file://{tmp_path}/none'}}]\n")
    assert validate(tmp_path, "job.yaml").returncode == 0
    done = validate(tmp_path, "job.yaml", "--online")
    assert done.returncode == 78
    assert f"job.yaml:3:17: data.0.source: {tmp_path}/none does not exist" in done.stderr


def test_a_missing_file_is_bad_usage(tmp_path: Path) -> None:
    done = validate(tmp_path, "none.yaml")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.splitlines()[0] == "error: there is no job spec none.yaml"
    done = validate(tmp_path, "none.yaml", "--json")
    assert done.returncode == 64
    assert json.loads(done.stdout)["errors"][0]["line"] is None


def test_secrets_stay_secret(tmp_path: Path) -> None:
    write(tmp_path, "name: a\ncommand: ${TOKEN}\nsecrets: [TOKEN]\nstore: ${TOKEN}\n")
    done = validate(tmp_path, "job.yaml", TOKEN="hunter22")
    assert done.returncode == 78
    assert "hunter22" not in done.stdout + done.stderr
