"""Real checkpoint bytes, made once, and a checkpoint folder to put them into."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Save = Callable[..., bytes]


@pytest.fixture(scope="session")
def torch_bytes() -> bytes:
    """What torch.save writes: two tensors, and a step under the key that Lightning uses."""
    import torch

    buffer = io.BytesIO()
    torch.save({"global_step": 77, "w": torch.arange(3000.0), "b": torch.zeros(5, dtype=torch.int64)}, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def legacy_bytes() -> bytes:
    """What torch.save wrote before it wrote zips."""
    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.arange(300.0)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def safetensors_bytes() -> bytes:
    return make_safetensors({"a": 400, "b": 80})


def make_safetensors(sizes: dict[str, int]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(256)) * (start // 256) + bytes(start % 256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoint folder."""
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


@pytest.fixture
def publish(folder: Path) -> Callable[[str, bytes | dict[str, bytes]], Path]:
    """Write a file, or a folder of files, under a temporary name and rename it into place, as good trainers do."""

    def go(name: str, content: bytes | dict[str, bytes]) -> Path:
        part = folder / f".tmp-{name}"
        write(part, content)
        # The rename must fall into a later tick of the file system's clock than the last write.
        wait_for_tick(folder)
        os.rename(part, folder / name)
        return folder / name

    return go


@pytest.fixture
def in_place(folder: Path) -> Callable[[str, bytes | dict[str, bytes]], Path]:
    """Write a file, or a folder of files, directly under its name, as most scripts do."""

    def go(name: str, content: bytes | dict[str, bytes]) -> Path:
        write(folder / name, content)
        return folder / name

    return go


def write(path: Path, content: bytes | dict[str, bytes]) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir(exist_ok=True)
    for name, data in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def wait_for_tick(folder: Path) -> None:
    """Until a new file in ``folder`` would be younger than what was written before."""
    probe = folder / ".probe"
    probe.write_bytes(b"")
    first = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns <= first:
        time.sleep(0.001)
        probe.write_bytes(b"x")
    probe.unlink()
