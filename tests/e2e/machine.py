"""Machines to kill: a folder each for what a real one would have on its disk, the real command line, real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Machine:
    """One machine: its own state and cache. ``store`` is shared with all others, as a bucket is."""

    disk: Path
    store: Path
    extra: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDRUN_")}
        return keep | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.disk / "state"),
            "XDG_CACHE_HOME": str(self.disk / "cache"),
            "XDG_DATA_HOME": str(self.disk / "data"),
            "PYTHONDONTWRITEBYTECODE": "",
            **self.extra,
        }

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """A cloudrun command in the background, its output in files on the disk."""
        self.disk.mkdir(parents=True, exist_ok=True)
        with (self.disk / "output").open("ab") as out:
            command = [sys.executable, "-m", "runner", *words]
            child = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=self.env, cwd=ROOT, **options)
        self.running.append(child)
        return child

    def run(self, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A cloudrun command, to its end."""
        command = [sys.executable, "-m", "runner", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env=self.env, cwd=ROOT, timeout=timeout, check=False
        )

    def status(self, job: str) -> dict[str, Any]:
        answer = self.run("status", job, "--json")
        assert answer.returncode == 0, answer.stderr
        told: dict[str, Any] = json.loads(answer.stdout)
        return told

    def output(self) -> str:
        return (self.disk / "output").read_text(errors="replace")

    def wipe(self) -> None:
        """Another machine: nothing of this one's disk is left."""
        wait_for(self.has_no_trainer, 2.0)
        shutil.rmtree(self.disk)

    def trainers(self) -> list[int]:
        """Processes that carry the trainer's environment of this machine."""
        mark = f"CLOUDRUN_CHECKPOINT_DIR={self.disk}".encode()
        return [pid for pid, environment in environments() if mark in environment]

    def has_no_trainer(self) -> bool:
        return not self.trainers()

    def kill_all(self) -> None:
        for child in self.running:
            child.kill()
            child.wait()
        for pid in self.trainers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def environments() -> Iterator[tuple[int, bytes]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield int(entry), Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, every: float = 0.05) -> Any:
    """The condition's first true answer; an assertion error when none comes."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if answer := condition():
            return answer
        time.sleep(every)
    raise AssertionError(f"{condition} did not become true within {seconds} s")
