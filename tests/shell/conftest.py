"""Real children, and the means to watch them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.supervisor.guard import processes
from runner.supervisor.trainer import Trainer

CHILDREN = Path(__file__).parent / "children"


def living(mark: str) -> list[int]:
    """Processes with this word in their command line, zombies not counted."""
    return [
        pid
        for pid, process in processes().items()
        if process.state != "Z" and pid != os.getpid() and mark.encode() in _command_line(pid)
    ]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Stage:
    """One test's folder and children. ``child`` makes a command line; ``start`` runs one under a Trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._trainers: list[Trainer] = []

    def child(self, mode: str, argument: str = "") -> list[str]:
        return [sys.executable, str(CHILDREN / "child.py"), mode, str(self.folder), *([argument] if argument else [])]

    def start(self, argv: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None) -> Trainer:
        trainer = Trainer()
        self._trainers.append(trainer)
        with self.log.open("wb") as log:
            trainer.start(argv, env=env or dict(os.environ), cwd=cwd or str(self.folder), output_fd=log.fileno())
        return trainer

    def output(self) -> str:
        return self.log.read_text()

    def await_mark(self, *names: str, within: float = 20.0) -> None:
        self.until(lambda: all((self.folder / name).exists() for name in names), within=within)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def living(self) -> list[int]:
        return living(str(self.folder))

    def until(self, happens: Callable[[], bool], within: float) -> None:
        give_up = time.monotonic() + within
        while not happens():
            assert time.monotonic() < give_up, f"still not so after {within} s; alive: {self.living()}"
            time.sleep(0.01)

    def clear(self) -> None:
        for trainer in self._trainers:
            trainer.kill()
            trainer.wait()
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.clear()
