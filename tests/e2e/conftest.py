"""What end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    one = Machine(tmp_path / "machine", tmp_path / "store")
    yield one
    one.kill_all()


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Write a job spec that trains with a script given as text."""

    def write(script: str, name: str = "job", lines: Sequence[str] = ()) -> Path:
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        spec = folder / f"{name}.yaml"
        text = [f"name: {name}", "command: python train.py", f"store: file://{tmp_path / 'store'}", *lines]
        spec.write_text("\n".join(text) + "\n")
        return spec

    return write


@pytest.fixture
def diary(machine: Machine, tmp_path: Path) -> Path:
    """A file in which trainers note their lives; it outlives every machine."""
    path = tmp_path / "diary"
    path.touch()
    machine.extra["DIARY"] = str(path)
    return path
