"""What the bytes of one file are: a torch file, an old pickle, safetensors, or something else. Known ones are whole."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from runner.checkpoint.formats.faults import BrokenError
from runner.checkpoint.formats.names import SUFFIXES, TORCH_SUFFIXES

Kind = Literal["torch", "pickle", "safetensors", "any"]

_ZIP = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_HEADER = 100 * 1024 * 1024
_MAX_PICKLE = 64 * 1024 * 1024
_PICKLED = (*SUFFIXES, ".pkl", ".pickle")
_MAY_BE_EMPTY_UNLESS = (*SUFFIXES, ".pkl", ".distcp", ".metadata")


@dataclass(frozen=True, slots=True)
class Content:
    """``pickle`` is the directory of a torch file, not unpickled; empty where it is too large to be looked into."""

    kind: Kind
    pickle: bytes = b""

    def number(self, *keys: str) -> int | None:
        """The whole number that a torch file's dictionary holds under the first of these keys that it has."""
        return next((found for key in keys if (found := number_in(self.pickle, key)) is not None), None)

    def says(self, key: str) -> bool:
        """True when a torch file's dictionary holds True under this key."""
        return re.search(_string(key) + _MEMO + rb"\x88", self.pickle, re.DOTALL) is not None


def content_of(path: Path) -> Content:
    """What a file holds. Raises BrokenError when it is known, by its first bytes or by its name, and not whole."""
    with open(path, "rb") as file:
        return _recognise(file, path.name.lower())


def content_of_member(folder: Path, member: str) -> Content:
    """As :func:`content_of`, of a file in a checkpoint folder. Empty is no fault where the name is unknown."""
    name = member.rpartition("/")[2].lower()
    try:
        with open(folder / member, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0 and not name.endswith(_MAY_BE_EMPTY_UNLESS):
                return Content("any")
            content = _recognise(file, name)
    except BrokenError as fault:
        raise BrokenError(f"{member} {fault}") from fault
    if content.kind == "any" and name.endswith(TORCH_SUFFIXES):
        raise BrokenError(f"{member} is not a torch file")
    return content


def _recognise(file: BinaryIO, name: str) -> Content:
    size = os.fstat(file.fileno()).st_size
    magic = file.read(32)
    if size == 0:
        raise BrokenError("is empty")
    if name.endswith(".safetensors"):
        _check_safetensors(file, size)
        return Content("safetensors")
    if name.endswith(".distcp"):
        # Many torch files in a row: only .metadata knows where each of them ends.
        return Content("any")
    if magic.startswith(_ZIP):
        return _zip(file, size)
    if not magic.strip(b"\0") and name.endswith(SUFFIXES):
        raise BrokenError("begins with zeros where a header belongs")
    if (_ZIP.startswith(magic) or _LEGACY_TORCH.startswith(magic)) and name.endswith(_PICKLED):
        raise BrokenError("ends within its first bytes")
    if magic.startswith(_LEGACY_TORCH):
        return Content("pickle")
    if _PICKLE.match(magic) and name.endswith(_PICKLED):
        _check_pickle_end(file, size)
        return Content("pickle")
    return Content("any")


def _check_pickle_end(file: BinaryIO, size: int) -> None:
    file.seek(size - 1)
    if file.read(1) != b".":
        raise BrokenError("the pickle does not end")


# ---- safetensors


def _check_safetensors(file: BinaryIO, size: int) -> None:
    """8 bytes + header + largest offset must be exactly the file."""
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise BrokenError("the header does not fit into the file")
    end = _data_end(file.read(length))
    if 8 + length + end != size:
        raise BrokenError(f"has {size} bytes, its header promises {8 + length + end}")


def _data_end(header: bytes) -> int:
    try:
        tensors = json.loads(header)
        spans = [tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"]
        if not all(type(a) is int and type(b) is int and 0 <= a <= b for a, b in spans):
            raise BrokenError("the header holds impossible offsets")
        return max((b for _, b in spans), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenError("the header is not valid JSON") from error


# ---- torch.save


def _zip(file: BinaryIO, size: int) -> Content:
    file.seek(max(0, size - 22))
    tail = file.read(22)
    if len(tail) < 22 or not tail.startswith(_ZIP_END) or tail[20:] != b"\0\0":
        raise BrokenError("the zip has no end: it was not written to the end")
    try:
        with zipfile.ZipFile(file) as opened:
            entries = sorted(opened.infolist(), key=lambda entry: entry.header_offset)
            _check_places(file, entries, opened.start_dir)
            pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
            return Content("torch", _directory(opened, pickles[0])) if pickles else Content("any")
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OverflowError, EOFError) as error:
        raise BrokenError(f"the zip's directory does not open: {error}") from error


def _check_places(file: BinaryIO, entries: list[zipfile.ZipInfo], directory: int) -> None:
    """Every local header must be where the directory says, and no entry may reach into the next."""
    if entries and entries[0].header_offset != 0:
        raise BrokenError("the zip does not begin with its first entry")
    limits = [entry.header_offset for entry in entries[1:]] + [directory]
    for entry, limit in zip(entries, limits, strict=bool(entries)):
        if _entry_end(file, entry) > limit:
            raise BrokenError(f"{entry.filename} reaches beyond its place")


def _entry_end(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437", "replace")
    file.seek(entry.header_offset)
    header = file.read(30 + len(name))
    if len(header) < 30 + len(name) or not header.startswith(_ZIP) or header[30:] != name:
        raise BrokenError(f"{entry.filename} is not where the zip's directory says")
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    return entry.header_offset + 30 + int(name_length) + int(extra_length) + entry.compress_size


def _directory(opened: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """What says where the tensors lie, and every number that is no tensor."""
    if entry.file_size > _MAX_PICKLE:
        return b""
    try:
        return opened.read(entry)
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise BrokenError(f"{entry.filename} is damaged") from error


# ---- numbers in a pickle, which is never unpickled

_MEMO = rb"(?:q.|r....|\x94)?"
_NUMBER = rb"(?:K(.)|M(..)|J(....)|\x8a(.))"


def _string(key: str) -> bytes:
    """How a pickle lays down a text of less than 256 bytes."""
    text = re.escape(key.encode())
    length = re.escape(len(key.encode()).to_bytes(1, "little"))
    return rb"(?:X" + length + rb"\0\0\0|\x8c" + length + rb")" + text


def number_in(pickle: bytes, key: str) -> int | None:
    """The number right behind a key: how a pickled dictionary lays down its items. None where there is none."""
    if key.encode() not in pickle:
        return None
    found = re.search(_string(key) + _MEMO + _NUMBER, pickle, re.DOTALL)
    if found is None:
        return None
    byte, short, long, huge = found.groups()
    if huge is not None:
        raw = pickle[found.end() : found.end() + huge[0]]
        return int.from_bytes(raw, "little", signed=True)
    return int.from_bytes(byte or short, "little") if long is None else int.from_bytes(long, "little", signed=True)
