"""Output whose reader has left, and questions that nobody answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environ(folder: Path) -> dict[str, str]:
    homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CACHE", "DATA")}
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), **homes}


def run_without_reader(folder: Path, *words: str, closed: str) -> subprocess.CompletedProcess[bytes]:
    """A command of which nobody reads the ``closed`` stream: what it writes there is refused from the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "runner", *words],
            cwd=folder,
            env=environ(folder),
            stdout=writer if closed == "stdout" else subprocess.PIPE,
            stderr=writer if closed == "stderr" else subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(f"name: digits\ncommand: sh\nstore: file://{tmp_path}/store\n")
    return tmp_path


@pytest.mark.parametrize(
    "words", ["--help", "--version", "submit --help", "schema", "validate job.yaml", "submit --dry-run job.yaml"]
)
def test_a_reader_that_leaves_is_no_error(project: Path, words: str) -> None:
    done = run_without_reader(project, *words.split(), closed="stdout")
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_that_nobody_reads_keeps_its_exit_code(project: Path) -> None:
    assert run_without_reader(project, "status", "nobody", closed="stderr").returncode == 64


@pytest.mark.parametrize("answer", ["", "perhaps\n"])
def test_a_question_without_a_terminal_names_the_option(project: Path, answer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner", "cache", "clear", "--all"],
        cwd=project, env=environ(project), input=answer, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 64
    assert done.stderr.splitlines()[-2:] == [
        "error: nobody answers: there is no terminal",
        "hint: to go on without being asked, add --yes",
    ]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 130)])
def test_an_answer_may_come_through_a_pipe(project: Path, answer: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner", "cache", "clear", "--all"],
        cwd=project, env=environ(project), input=answer, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert "nobody answers" not in done.stderr
