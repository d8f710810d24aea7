"""The bytes of one valid safetensors file: laid out once, copied to wherever they go, read back without copying.

A file is 8 bytes of header length, a JSON header (name -> dtype, shape, span of bytes), then the tensors without gaps.
Any safetensors reader can open it. Tensors of large elements come first and the data starts at a multiple of 64, so
that each tensor lies on a multiple of its element size.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Younger dtypes, which an old torch does not have.
_YOUNGER = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
_CODES |= {getattr(torch, name): code for name, code in _YOUNGER.items() if hasattr(torch, name)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ALIGNMENT = 64
_STAGE = 8 * 1024 * 1024
_PIECE = 4 * 1024 * 1024
_MAX_HEADER = 100 * 1024 * 1024


class DamagedCheckpoint(ValueError):
    """A file or folder that is not the whole checkpoint its own words promise."""


def has_code(dtype: torch.dtype) -> bool:
    """True when safetensors knows this dtype; other dtypes must come as bytes (:mod:`.state` sees to it)."""
    return dtype in _CODES


@dataclass(frozen=True, slots=True)
class Image:
    """One safetensors file that is not written yet.

    header    8-byte length and JSON, padded so that the data starts at a multiple of 64
    tensors   source tensors on any device, any strides, each with its offset in bytes from the start of the file
    size      bytes of the whole file
    """

    header: bytes
    tensors: tuple[tuple[Tensor, int], ...]
    size: int

    def copy_into(self, buffer: Tensor) -> None:
        """Fill ``buffer`` (uint8, contiguous, ``size`` bytes, on the CPU) with the file: one copy of each tensor."""
        buffer[: len(self.header)].copy_(_bytes_tensor(self.header))
        pieces: list[tuple[int, int, int]] = []
        devices = set()
        for source, offset in self.tensors:
            size = _bytes_of(source)
            if not size:
                continue
            if _is_plain(source):
                pieces += _cut(buffer.data_ptr() + offset, source.data_ptr(), size)
                continue
            buffer[offset : offset + size].view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
            devices.add(source.device)
        _copy_all(pieces)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def write_to(self, file: BinaryIO) -> None:
        """Write the file in order, through one small buffer."""
        file.write(self.header)
        stage = bytearray(_STAGE)
        window = torch.frombuffer(stage, dtype=torch.uint8)
        for source, _ in self.tensors:
            flat = source.contiguous().view(-1).view(torch.uint8)
            for start in range(0, len(flat), _STAGE):
                piece = flat[start : start + _STAGE]
                window[: len(piece)].copy_(piece)
                file.write(memoryview(stage)[: len(piece)])


def image_of(tensors: Mapping[str, Tensor]) -> Image:
    """Lay ``tensors`` out. Nothing is copied: the image refers to them until it is written."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans, end = [], 0
    for name, tensor in ordered:
        start, end = end, end + _bytes_of(tensor)
        spans.append((tensor.detach(), start))
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = _padded(json.dumps(entries, separators=(",", ":")).encode())
    return Image(header, tuple((tensor, len(header) + start) for tensor, start in spans), len(header) + end)


def load_image(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped and private: writing to them never reaches the file.

    Raises DamagedCheckpoint when the file is not whole.
    """
    with open(path, "rb") as file:
        size = path.stat().st_size
        if size < 8:
            raise DamagedCheckpoint(f"{path} is shorter than a header")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = struct.unpack("<Q", mapped[:8])[0]
    if length > min(size - 8, _MAX_HEADER):
        raise DamagedCheckpoint(f"{path}: the header does not fit into the file")
    entries = _entries(path, mapped[8 : 8 + length])
    end = max((stop for _, _, _, stop in entries), default=0)
    if 8 + length + end != size:
        raise DamagedCheckpoint(f"{path} has {size} bytes, its header promises {8 + length + end}")
    whole = torch.frombuffer(mapped, dtype=torch.uint8)[8 + length :]
    return {name: _part(whole, dtype, shape, stop) for name, dtype, shape, stop in entries}


def _entries(path: Path, header: bytes) -> list[tuple[str, torch.dtype, list[int], int]]:
    try:
        parsed = json.loads(header)
        parsed.pop("__metadata__", None)
        entries = [
            (name, _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]) for name, entry in parsed.items()
        ]
        for name, dtype, shape, (start, stop) in entries:
            if start < 0 or stop - start != _count(shape) * dtype.itemsize:
                raise DamagedCheckpoint(f"{path}: the span of {name} does not fit its shape")
        return [(name, dtype, shape, stop) for name, dtype, shape, (_, stop) in entries]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: the header cannot be read: {error}") from error


def _part(whole: Tensor, dtype: torch.dtype, shape: list[int], stop: int) -> Tensor:
    size = _count(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    piece = whole[stop - size : stop]
    if piece.storage_offset() % dtype.itemsize:  # another writer's file
        piece = piece.clone()
    return piece.view(dtype).view(shape)


def _count(shape: list[int]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def _is_plain(tensor: Tensor) -> bool:
    """True for bytes that lie in this process's memory as they are to lie in the file."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()


def _cut(target: int, source: int, size: int) -> list[tuple[int, int, int]]:
    """Addresses and lengths of pieces that threads can share."""
    return [(target + start, source + start, min(_PIECE, size - start)) for start in range(0, size, _PIECE)]


def _copy_all(pieces: list[tuple[int, int, int]]) -> None:
    """As many threads as torch has, each taking the next piece.

    Not torch's own copy: that waits for all threads after each of a thousand tensors, and where cores are busy (loader
    workers, the supervisor) each wait costs milliseconds. Measured so: 5 to 20 times slower.
    """
    left = iter(pieces)

    def work(_: int) -> None:
        for target, source, size in left:
            ctypes.memmove(target, source, size)

    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1:
        work(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(header: bytes) -> bytes:
    """JSON may end in spaces: they bring the data to the alignment."""
    padding = -(8 + len(header)) % _ALIGNMENT
    return struct.pack("<Q", len(header) + padding) + header + b" " * padding
