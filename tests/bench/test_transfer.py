"""The transfer benchmark runs, on small data, and measures what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.clients import TASKS
from scripts.bench.transfer import CLIENTS, FailedError, aside, run, same_content

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder whose name is short: a server makes sockets below it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield Path(folder)


def bench(*arguments: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.bench.transfer", "--quick", "--rounds", "1", "--scratch", str(scratch)]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.soak
@pytest.mark.parametrize("server", ["nginx", "seaweedfs"])
def test_every_client_does_every_task(scratch: Path, server: str) -> None:
    if server == "nginx" and not shutil.which("nginx", path="/usr/sbin:/usr/bin"):
        pytest.skip("nginx is not installed")
    done = bench("--server", server, "--json", scratch=scratch)
    rows = json.loads(done.stdout)
    assert {(row["client"], row["task"]): row["failed"] for row in rows} == {
        (client, task): ""
        for client in CLIENTS
        if client != "aws"
        for task in ("down-small", "no-op", "down-large", "up-large", "up-small")
    }, done.stderr
    assert done.returncode == 0
    assert all(0 < row["wall"] < 100 and row["cpu"] > 0 and row["rss"] > 1 << 20 for row in rows)
    assert list(scratch.iterdir()) == []


def test_a_table_has_ratios(scratch: Path) -> None:
    done = bench("--server", "seaweedfs", "--tasks", "up-small", "--clients", "s5cmd", "obstore", scratch=scratch)
    assert "60 x 100 KiB up" in done.stdout, done.stderr
    reference = next(line for line in done.stdout.splitlines() if line.startswith("| s5cmd |"))
    assert reference.split(" | ")[4] == "1.00"


def test_a_client_that_fails_says_why() -> None:
    with pytest.raises(FailedError, match="exit 3: the last word"):
        run([sys.executable, "-c", "import sys; print('first'); print('the last word'); sys.exit(3)"], {})


def test_time_and_memory_of_children_count() -> None:
    burn = "x = bytearray(200 << 20)\nfor _ in range(3_000_000): pass"
    alone = run([sys.executable, "-c", burn], {})
    parent = run(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"], {}
    )
    assert parent.cpu >= alone.cpu * 0.7
    assert alone.rss > 200 << 20
    assert parent.rss > 200 << 20


def test_what_is_done_aside_can_fail() -> None:
    def fail() -> None:
        raise FailedError("a wrong byte")

    aside(lambda: None)
    with pytest.raises(FailedError, match="a wrong byte"):
        aside(fail)


def test_contents_are_compared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for data, same in ((b"x" * 3_000_000, True), (b"x" * 2_999_999, False), (b"x" * 2_999_999 + b"y", False)):
        one.write_bytes(b"x" * 3_000_000)
        other.write_bytes(data)
        assert same_content(one, other) is same


def test_every_library_knows_every_task_that_is_its_own() -> None:
    tasks = {"down-small", "no-op", "down-large", "up-large", "up-small"}
    for library in ("boto3", "obstore"):
        assert {task for client, task in TASKS if client == library} == tasks
