"""Slots as a trainer writes them, made by hand: also such that no trainer would write."""

from __future__ import annotations

import json
import struct
from pathlib import Path

HEADER = struct.Struct("<16sQQQIIQQ")
MAGIC = b"CLOUDRUN-SLOT-1\n"
WRITING, READY = 1, 2


def image_of(step: int, size: int) -> bytes:
    """A whole safetensors file with one tensor of bytes, which tell the step."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header + bytes([step % 251]) * size


def write_slot(
    folder: Path,
    step: int,
    *,
    rank: int = 0,
    number: int = 0,
    world: int = 1,
    sequence: int = 1,
    state: int = READY,
    size: int = 10_000,
    meta: bytes | None = None,
) -> Path:
    """A slot file with the image and a description of this step."""
    image = image_of(step, size)
    if meta is None:
        told = {"format": "cloudrun-training", "version": 1, "step": step, "metrics": {"loss": 0.5}, "rank": rank}
        meta = json.dumps(told).encode()
    header = HEADER.pack(MAGIC, state, sequence, step, rank, world, len(meta), len(image))
    path = folder / f"rank{rank}-{number}"
    path.write_bytes(header.ljust(4096, b"\0") + meta + b"\0" * (-len(meta) % 4096) + image + b"\0" * 8192)
    path.chmod(0o600)
    return path
