"""The process that brings a snapshot to the disk: real processes, real full and read-only disks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.supervisor import saver


def an_order(folder: Path, source: Path, size: int, **more: Any) -> dict[str, Any]:
    copy = {"name": "state.safetensors", "source": str(source), "offset": 4096, "bytes": size}
    return {
        "target": str(folder / "step-000000000007"),
        "part": str(folder / ".snapshot-x"),
        "hurried": True,
        "copies": [copy],
        "texts": {"state.json": '{"step": 7}'},
        **more,
    }


def start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", saver.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(order).encode())
    child.stdin.close()
    child.stdin = None
    return child


def save(order: dict[str, Any]) -> dict[str, Any]:
    out, _ = start(order).communicate(timeout=60)
    told: dict[str, Any] = json.loads(out)
    return told


def source_of(folder: Path, content: bytes) -> Path:
    path = folder / "slot"
    path.write_bytes(b"\0" * 4096 + content + b"\xff" * 5000)
    return path


@pytest.mark.parametrize("size", [0, 1, 4096, 100_001, (32 << 20) + 4097])
@pytest.mark.parametrize("disk", ["usual", "tmpfs"])
def test_every_byte_arrives(tmp_path: Path, mount: Callable[[str], Path], size: int, disk: str) -> None:
    content = (os.urandom(4093) * (size // 4093 + 1))[:size]
    folder = mount("size=80m") if disk == "tmpfs" else tmp_path / "checkpoints"
    folder.mkdir(exist_ok=True)
    assert save(an_order(folder, source_of(tmp_path, content), size)) == {"saved": True}
    assert sorted(os.listdir(folder)) == ["step-000000000007"]
    saved = folder / "step-000000000007"
    assert (saved / "state.safetensors").read_bytes() == content
    assert (saved / "state.json").read_text() == '{"step": 7}'


@pytest.mark.parametrize("done", [0, 33 << 20])
def test_a_file_system_that_cannot_write_past_the_cache_gets_the_rest_through_it(tmp_path: Path, done: int) -> None:
    content = os.urandom(1 << 20) * 70 + b"end"
    source = os.open(source_of(tmp_path, content), os.O_RDONLY)
    (tmp_path / "copy").write_bytes(content[:done])
    target = os.open(tmp_path / "copy", os.O_WRONLY)
    saver._copy_through_the_cache(source, 4096, target, done, len(content))
    os.close(source)
    os.close(target)
    assert (tmp_path / "copy").read_bytes() == content


def test_a_source_that_ends_too_early_is_no_checkpoint(tmp_path: Path) -> None:
    source = source_of(tmp_path, b"x" * 1000)
    assert "failed" in save(an_order(tmp_path, source, 9_000_000))
    assert os.listdir(tmp_path) == ["slot"]


@pytest.mark.parametrize("hidden", ["it says", "it does not say"])
def test_a_full_disk_is_told_and_left_as_it_was(tmp_path: Path, mount: Callable[[str], Path], hidden: str) -> None:
    disk = mount("size=1m" if hidden == "it says" else "size=4m,nr_inodes=3")
    told = save(an_order(disk, source_of(tmp_path, b"x" * 2_000_000), 2_000_000))
    assert "disk is full" in told["failed"] or "No space left" in told["failed"]
    assert os.listdir(disk) == []


def test_a_read_only_disk_is_told(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    disk = mount("size=4m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert save(an_order(disk, source_of(tmp_path, b"x" * 1000), 1000)) == {"failed": "Read-only file system"}


def test_a_step_that_is_there_stays(tmp_path: Path) -> None:
    there = tmp_path / "step-000000000007"
    there.mkdir()
    (there / "state.json").write_text("the first")
    assert save(an_order(tmp_path, source_of(tmp_path, b"x" * 1000), 1000)) == {"saved": True}
    assert (there / "state.json").read_text() == "the first"
    assert sorted(os.listdir(tmp_path)) == ["slot", "step-000000000007"]


def test_killed_in_the_middle_it_leaves_no_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "slot"
    with source.open("wb") as file:
        file.truncate(4096 + (2 << 30))
    child = start(an_order(tmp_path, source, 2 << 30))
    part = tmp_path / ".snapshot-x" / "state.safetensors"
    give_up = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 0):
        assert child.poll() is None, "it was done before it could be killed"
        assert time.monotonic() < give_up
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert sorted(os.listdir(tmp_path)) == [".snapshot-x", "slot"]


def test_it_stands_back_behind_everybody_else() -> None:
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); import saver; saver.stand_back(); "
        "group = '/proc/self/autogroup'; "
        "print(os.nice(0), open(group).read() if os.path.exists(group) else '', flush=True);"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(saver.__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    nice, _, group = child.stdout.readline().partition(" ")
    assert nice == "19"
    assert not group.strip() or group.strip().endswith("nice 19")
    if os.uname().machine == "x86_64":
        assert ctypes.CDLL(None).syscall(252, 1, child.pid) == saver._IOPRIO_IDLE  # ioprio_get
    child.communicate("", timeout=10)
