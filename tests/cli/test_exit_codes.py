"""One fault, one exit code: whichever command meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.cli.main import main
from tests.servers import Server

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "validate": ("validate", "--online"),
    "sync": ("sync",),
    "plan": ("submit", "--dry-run"),
    "submit": ("submit",),
    "status": ("status",),
    "checkpoints": ("checkpoints", "ls"),
}

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Place:
    """What the faults are about: a folder of the test's own, a server with a bucket that holds ``data/x``."""

    folder: Path
    server: Server
    bucket: str
    patch: pytest.MonkeyPatch

    def write(self, text: str) -> None:
        """The job of a test; ``text`` may name what is in the place."""
        filled = text.format(folder=self.folder, bucket=self.bucket, endpoint=self.server.endpoint)
        (self.folder / "job.yaml").write_text(f"name: digits\ncommand: 'true'\n{filled}\n")

    def run(self, command: str, *options: str, **environ: str) -> int:
        """The exit code of a command about the job. Its output goes to the descriptors of this process."""
        for name, value in environ.items():
            self.patch.setenv(name, value)
        words = [*COMMANDS[command], *options, str(self.folder / "job.yaml")]
        if command == "submit":
            # It takes over signals and children: not in this process.
            return subprocess.run([sys.executable, "-m", "runner", *words], timeout=100, check=False).returncode
        with pytest.raises(SystemExit) as left:
            main(words)
        assert isinstance(left.value.code, int)
        return left.value.code


@pytest.fixture(scope="module")
def bucket(seaweedfs: Server) -> str:
    name = "exit-codes"
    seaweedfs.make_bucket(name)
    seaweedfs.client().put_object(Bucket=name, Key="data/x", Body=b"x")
    return name


@pytest.fixture
def place(tmp_path: Path, seaweedfs: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    homes = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("STATE", "CACHE", "DATA")}
    for name, value in {**homes, "PYTHONPATH": str(ROOT), **seaweedfs.environ()}.items():
        monkeypatch.setenv(name, value)
    return Place(tmp_path, seaweedfs, bucket, monkeypatch)


S3 = "storage: {{endpoint: '{endpoint}'}}\n"
GOOD_STORE = "store: file://{folder}/store\n"
BOTH_IN_BUCKET = S3 + "store: s3://{bucket}\ndata: [{{source: 's3://{bucket}/data'}}]"

# fault, spec, exit code, the commands that meet it
TABLE = [
    ("an unknown key", "stor: x", 78, "validate sync plan submit status checkpoints"),
    ("a bucket's bad name", "store: s3://Digits", 78, "validate sync plan submit status checkpoints"),
    ("the store is a file", "store: file://{folder}/file", 69, "validate plan submit status checkpoints"),
    ("the store lies below a file", "store: file://{folder}/file/x", 69, "validate submit"),
    ("no such bucket", S3 + "store: s3://no-such-bucket", 69, "validate plan submit status checkpoints"),
    ("no such bucket of data", S3 + GOOD_STORE + "data: [{{source: 's3://no-such-bucket/x'}}]", 69,
     "validate sync submit"),
    ("nobody listens", "storage: {{endpoint: 'http://127.0.0.1:1'}}\nstore: s3://digits", 69, "validate"),
    ("no such data", S3 + GOOD_STORE + "data: [{{source: 's3://{bucket}/none'}}]", 78, "validate sync submit"),
    ("no such folder", GOOD_STORE + "data: [{{source: 'file://{folder}/none'}}]", 78, "validate sync submit"),
    ("an empty folder", GOOD_STORE + "data: [{{source: 'file://{folder}/empty'}}]", 78, "validate sync submit"),
]  # fmt: skip
CASES = [(fault, spec, code, command) for fault, spec, code, commands in TABLE for command in commands.split()]


@pytest.mark.parametrize(
    ("spec", "code", "command"), [case[1:] for case in CASES], ids=[f"{case[0]}: {case[3]}" for case in CASES]
)
def test_one_fault_has_one_exit_code(place: Place, capfd: Capture, spec: str, code: int, command: str) -> None:
    place.write(spec)
    assert place.run(command) == code
    told = capfd.readouterr().err
    assert "error: " in told
    assert "Traceback" not in told


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_credentials(place: Place, capfd: Capture, command: str) -> None:
    place.write(BOTH_IN_BUCKET)
    assert place.run(command, AWS_SECRET_ACCESS_KEY="another") == 77
    assert "check key, secret and session token" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["validate", "sync", "submit"])
def test_no_credentials(place: Place, capfd: Capture, command: str) -> None:
    place.write(BOTH_IN_BUCKET)
    nobody = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    nobody |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    assert place.run(command, **nobody) == 77
    assert "no credentials" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["validate", "submit"])
def test_the_store_is_asked_first(place: Place, command: str) -> None:
    place.write("store: file://{folder}/file\ndata: [{{source: 'file://{folder}/none'}}]")
    assert place.run(command) == 69


def test_programs_are_told_the_code_of_each_error(place: Place, capfd: Capture) -> None:
    place.write(S3 + "store: s3://no-such-bucket\ndata: [{{source: 's3://{bucket}/none'}}]")
    assert place.run("validate", "--json") == 69
    errors = json.loads(capfd.readouterr().out)["errors"]
    assert [(error["key"], error["exit_code"]) for error in errors] == [("store", 69), ("data.0.source", 78)]


@pytest.mark.root
@pytest.mark.parametrize("command", ["validate", "submit"])
def test_a_store_that_may_not_be_written(place: Place, mount: Callable[[str], Path], command: str) -> None:
    place.write(f"store: file://{mount('ro')}/store")
    assert place.run(command) == 77
