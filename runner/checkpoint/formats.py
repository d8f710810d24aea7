"""Is this file or folder a complete checkpoint? Told from names and structure alone.

Nothing is ever unpickled. The rules are those of the common trainers: a torch file is a zip
whose directory comes last, a safetensors file says its own length, a trainer's folder is complete when the file that
the trainer writes last is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickletools
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from runner.files import is_hidden

FORMATS = (
    "auto", "torch", "dcp", "transformers", "lightning", "accelerate", "deepspeed", "ultralytics", "composer", "any",
)  # fmt: skip
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pth.tar")

_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
_TEMPORARY = (".tmp", ".part", ".partial")
_ZIP = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_HEADER = 100 * 1024 * 1024
_MAX_SMALL = 64 * 1024 * 1024

# Rows are tried from the top; the last match inside a name counts. Steps come before counters that may be steps,
# and those before epochs.
_STEP_RULES = tuple(
    re.compile(rule, re.IGNORECASE)
    for rule in (
        r"(?<![a-z])global[-_]?step[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])steps?[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:iteration|iter|itr)[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:batch|ba|updates?)[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:checkpoint|ckpt|chkpt)[-_=]\d+_(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:checkpoint|ckpt|chkpt|model|state|weights|snapshot|save)[-_=](\d{1,15})(?![0-9a-z]|-of-\d)",
        r"(?<![a-z])(?:epoch|ep)[-_=]?(\d{1,15})(?![0-9a-z])",
        r"^(?:checkpoint|ckpt)(\d{1,15})(?![0-9a-z])",
        r"^(\d{1,15})(?=\.(?:pt|pth|ckpt|bin|safetensors|pth\.tar)$)",
    )
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the bytes of a file or folder say.

    complete   nothing is missing, as far as its structure tells
    format     torch, safetensors, pickle, folder, transformers, dcp or any; ``other`` where it is no checkpoint at all
    reason     why it is not complete; empty when it is
    settle     the structure cannot prove that the writer has finished: it must also have been quiet for a while
    step       the step that the format's own small files tell, where they do
    """

    complete: bool
    format: str
    reason: str = ""
    settle: bool = False
    step: int | None = None


class _BrokenError(Exception):
    """The structure has a fault; the message says which."""


def step_of(name: str) -> int | None:
    """The training step that a name tells, or None. An epoch counts where a name tells no step."""
    for rule in _STEP_RULES:
        found = rule.findall(name)
        if found:
            return int(found[-1])
    return None


def is_never(name: str) -> bool:
    """True for names that are never checkpoints: hidden or temporary."""
    return name.startswith((".", "tmp")) or name.endswith(_TEMPORARY)


def looks_like_checkpoint(name: str, *, is_dir: bool) -> bool:
    """What a name alone suggests."""
    if is_never(name):
        return False
    return (not is_dir and name.lower().endswith(SUFFIXES)) or step_of(name) is not None


def judge(path: Path, format: str = "auto") -> Verdict:  # noqa: A002 (the word of the spec)
    """The verdict on a file or folder, under one of :data:`FORMATS`. Never raises for what it finds there."""
    try:
        if path.is_dir():
            return _judge_folder(path, format)
        return _judge_file(path, format)
    except _BrokenError as fault:
        return Verdict(complete=False, format=_claimed(path), reason=str(fault))
    except OSError as error:
        return Verdict(complete=False, format=_claimed(path), reason=f"cannot be read: {error.strerror}")


def _claimed(path: Path) -> str:
    """What a broken entry was meant to be, by its name or its first bytes."""
    if path.is_dir():
        return "folder"
    name = path.name.lower()
    if name.endswith(".safetensors"):
        return "safetensors"
    bare_step = "." not in name and step_of(name) is not None
    return "torch" if bare_step or name.endswith(SUFFIXES) else "other"


# ---- files


def _judge_file(path: Path, wanted: str) -> Verdict:
    with open(path, "rb") as file:
        verdict = _recognise(file, path.name.lower())
    if wanted == "any" or verdict.format == "torch":
        return verdict
    if wanted in ("torch", "ultralytics", "composer"):
        return verdict if verdict.format == "pickle" else _other(f"is not a torch file, as format {wanted} asks")
    if wanted in ("dcp", "transformers", "accelerate", "deepspeed"):
        return _other(f"is not a folder, as format {wanted} asks")
    if verdict.format == "any":
        return _other("is neither a torch file nor safetensors")
    return verdict


def _other(reason: str) -> Verdict:
    return Verdict(complete=False, format="other", reason=reason)


def _recognise(file: BinaryIO, name: str) -> Verdict:
    """Raises _BrokenError when the file is known by magic or name, and not whole."""
    size = os.fstat(file.fileno()).st_size
    magic = file.read(32)
    if size == 0:
        raise _BrokenError("is empty")
    if name.endswith(".safetensors"):
        _check_safetensors(file, size)
        return Verdict(complete=True, format="safetensors")
    if magic.startswith(_ZIP):
        return _judge_zip(file, size)
    if not magic.strip(b"\0") and name.endswith(SUFFIXES):
        raise _BrokenError("begins with zeros where a header belongs")
    if magic.startswith(_LEGACY_TORCH):
        return Verdict(complete=True, format="pickle", settle=True)
    if _PICKLE.match(magic) and name.endswith((*SUFFIXES, ".pkl", ".pickle")):
        _check_pickle_end(file, size)
        return Verdict(complete=True, format="pickle", settle=True)
    return Verdict(complete=True, format="any", settle=True)


def _check_pickle_end(file: BinaryIO, size: int) -> None:
    file.seek(size - 1)
    if file.read(1) != b".":
        raise _BrokenError("the pickle does not end")


def _check_safetensors(file: BinaryIO, size: int) -> None:
    """8 bytes + header + largest offset must be exactly the file."""
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise _BrokenError("the header does not fit into the file")
    end = _data_end(file.read(length))
    if 8 + length + end != size:
        raise _BrokenError(f"has {size} bytes, its header promises {8 + length + end}")


def _data_end(header: bytes) -> int:
    try:
        tensors = json.loads(header)
        spans = [tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"]
        if not all(type(a) is int and type(b) is int and 0 <= a <= b for a, b in spans):
            raise _BrokenError("the header holds impossible offsets")
        return max((b for _, b in spans), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _BrokenError("the header is not valid JSON") from error


def _judge_zip(file: BinaryIO, size: int) -> Verdict:
    entries, directory = _open_zip(file, size)
    _check_places(file, entries, directory)
    pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
    if not pickles:
        return Verdict(complete=True, format="any", settle=True)
    return Verdict(complete=True, format="torch")


def _open_zip(file: BinaryIO, size: int) -> tuple[list[zipfile.ZipInfo], int]:
    """The entries by position, and where the central directory starts. The directory must end the file."""
    file.seek(max(0, size - 22))
    tail = file.read(22)
    if len(tail) < 22 or not tail.startswith(_ZIP_END) or tail[20:] != b"\0\0":
        raise _BrokenError("the zip has no end: it was not written to the end")
    try:
        with zipfile.ZipFile(file) as opened:
            entries = sorted(opened.infolist(), key=lambda entry: entry.header_offset)
            return entries, opened.start_dir
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OverflowError, EOFError) as error:
        raise _BrokenError(f"the zip's directory does not open: {error}") from error


def _check_places(file: BinaryIO, entries: list[zipfile.ZipInfo], directory: int) -> None:
    """Every local header must be where the directory says, and no entry may reach into the next."""
    if entries and entries[0].header_offset != 0:
        raise _BrokenError("the zip does not begin with its first entry")
    limits = [entry.header_offset for entry in entries[1:]] + [directory]
    for entry, limit in zip(entries, limits, strict=bool(entries)):
        if _entry_end(file, entry) > limit:
            raise _BrokenError(f"{entry.filename} reaches beyond its place")


def _entry_end(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437", "replace")
    file.seek(entry.header_offset)
    header = file.read(30 + len(name))
    if len(header) < 30 + len(name) or not header.startswith(_ZIP) or header[30:] != name:
        raise _BrokenError(f"{entry.filename} is not where the zip's directory says")
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    return entry.header_offset + 30 + int(name_length) + int(extra_length) + entry.compress_size


_STEP_KEYS = frozenset({"global_step", "iter_num", "iteration"})
_MEMO = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})


def step_inside(path: Path) -> int | None:
    """The step that a whole torch file tells under a usual key (``global_step``), found without unpickling.

    For names that tell none, such as ``last.ckpt``. None where there is no such key, or the file is no torch file.
    """
    try:
        with zipfile.ZipFile(path) as opened:
            names = [entry for entry in opened.infolist() if entry.filename.endswith("/data.pkl")]
            if not names or names[0].file_size > _MAX_SMALL:
                return None
            return _step_in_pickle(opened.read(names[0]))
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, EOFError, struct.error):
        return None


def _step_in_pickle(data: bytes) -> int | None:
    """The number right behind a string that is a step key: how a pickled dictionary lays down its items."""
    if not any(key.encode() in data for key in _STEP_KEYS):
        return None
    key: object = None
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name in _MEMO:
            continue
        if key in _STEP_KEYS and type(value) is int and opcode.name.startswith(("BININT", "INT", "LONG")):
            return value if value >= 0 else None
        key = value if isinstance(value, str) else None
    return None


# ---- folders


_LAST_WRITTEN = frozenset({".metadata", "trainer_state.json"})
_REQUIRED = {
    "dcp": (r"(.*/)?\.metadata", "has no .metadata"),
    "transformers": (r"trainer_state\.json", "has no trainer_state.json, which the trainer writes last"),
    "accelerate": (r"random_states_0\.pkl", "has no random_states_0.pkl, which accelerate writes last"),
    "deepspeed": (r".*_(optim|model)_states\.pt", "has no DeepSpeed states"),
}


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file below ``folder`` (path relative to it, its stat), and every folder (path ends in ``/``).

    Links to files are followed, links to folders are not; sockets, devices and pipes are left out, and what no store
    takes (:func:`runner.files.is_hidden`). Raises OSError for what cannot be read, also for a link that leads nowhere.
    """
    yield from _walk(str(folder), "")


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        ordered = sorted((entry for entry in entries if not is_hidden(entry.name)), key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            yield f"{prefix}{entry.name}/", entry.stat(follow_symlinks=False)
            yield from _walk(entry.path, f"{prefix}{entry.name}/")
            continue
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            yield prefix + entry.name, status


def may_be_checkpoint(folder: Path, format: str) -> bool:  # noqa: A002 (the word of the spec)
    """What a folder's own name, or one at its top, suggests: told without a walk, which in a data folder takes long."""
    if format == "any" or step_of(folder.name) is not None:
        return True
    with os.scandir(folder) as entries:
        return any(entry.name in _LAST_WRITTEN or entry.name.lower().endswith(SUFFIXES) for entry in entries)


def _judge_folder(path: Path, wanted: str) -> Verdict:
    if not may_be_checkpoint(path, wanted):
        return _other("is a folder without checkpoint files")
    members = [name for name, _ in walk(path) if not name.endswith("/")]
    if not members:
        raise _BrokenError("is an empty folder")
    _check_names(path)
    formats = {_judge_member(path, member).format for member in members}
    named = step_of(path.name) is not None or not _LAST_WRITTEN.isdisjoint(members)
    if wanted != "any" and not named and formats == {"any"}:
        return _other("is a folder without checkpoint files: what ends in .bin there is data")
    if wanted in ("torch", "ultralytics", "composer") and not formats & {"torch", "pickle"}:
        return _other("is a folder without torch files")
    if wanted in _REQUIRED and not any(re.fullmatch(_REQUIRED[wanted][0], member) for member in members):
        raise _BrokenError(_REQUIRED[wanted][1])
    return _by_trainer(path, frozenset(members))


def _check_names(folder: Path) -> None:
    for member, _ in walk(folder):
        name = member.rstrip("/").rpartition("/")[2].lower()
        if name.startswith((".tmp", "tmp")) or name.endswith(_TEMPORARY) or "incomplete" in name:
            raise _BrokenError(f"{member} says that the save has not ended")


def _judge_member(folder: Path, member: str) -> Verdict:
    """Raises _BrokenError for a file that is known and not whole. Empty is no fault where the name is unknown."""
    name = member.rpartition("/")[2].lower()
    try:
        with open(folder / member, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0 and not name.endswith((*SUFFIXES, ".pkl", ".distcp", ".metadata")):
                return Verdict(complete=True, format="any")
            verdict = _recognise(file, name)
    except _BrokenError as fault:
        raise _BrokenError(f"{member} {fault}") from fault
    if verdict.format == "any" and name.endswith(_TORCH_SUFFIXES):
        raise _BrokenError(f"{member} is not a torch file")
    return verdict


def _by_trainer(path: Path, members: frozenset[str]) -> Verdict:
    """Only what the trainer writes last proves that a folder written in place is complete."""
    _check_indexes(path, members)
    sharded = _check_shards(path, members)
    if "trainer_state.json" in members:
        return _transformers(path)
    if "training_args.bin" in members and step_of(path.name) is not None:
        raise _BrokenError("has no trainer_state.json, which the trainer writes last")
    return Verdict(complete=True, format="dcp") if sharded else Verdict(complete=True, format="folder", settle=True)


def _transformers(path: Path) -> Verdict:
    state = _read_json(path / "trainer_state.json")
    step = state.get("global_step")
    if type(step) is not int:
        raise _BrokenError("trainer_state.json tells no global_step")
    named = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if named and int(named[1]) != step:
        raise _BrokenError(f"trainer_state.json is of step {step}")
    return Verdict(complete=True, format="transformers", step=step)


def _check_indexes(path: Path, members: frozenset[str]) -> None:
    """Every shard that an ``*.index.json`` names must be there."""
    for index in (member for member in members if member.endswith(".index.json")):
        weights = _read_json(path / index).get("weight_map")
        shards = set(weights.values()) if isinstance(weights, dict) else set()
        folder = index.rpartition("/")[0]
        missing = sorted(str(shard) for shard in shards if (f"{folder}/{shard}" if folder else shard) not in members)
        if missing:
            raise _BrokenError(f"{missing[0]} is missing, which {index} names")


def _check_shards(path: Path, members: frozenset[str]) -> bool:
    """torch.distributed.checkpoint: ``.metadata`` comes last and names the shards. True where it is one."""
    folders = {member.rpartition("/")[0] for member in members if member.endswith((".distcp", ".metadata"))}
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        if f"{prefix}.metadata" not in members:
            raise _BrokenError(f"{prefix}.metadata is missing, which is written last")
        for shard in set(re.findall(rb"__\d+_\d+\.distcp", _metadata(path / prefix / ".metadata"))):
            if prefix + shard.decode() not in members:
                raise _BrokenError(f"{prefix}{shard.decode()} is missing")
    return "" in folders


def _metadata(path: Path) -> bytes:
    data = path.read_bytes() if path.stat().st_size <= _MAX_SMALL else b"."
    if not data.endswith(b"."):
        raise _BrokenError(".metadata does not end")
    return data


def _read_json(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_bytes()) if path.stat().st_size <= _MAX_SMALL else None
    except (ValueError, RecursionError) as error:
        raise _BrokenError(f"{path.name} is not whole") from error
    if not isinstance(raw, dict):
        raise _BrokenError(f"{path.name} is not what it should be")
    return raw


def with_step(verdict: Verdict, path: Path) -> Verdict:
    """The verdict, with the step that lies inside a torch file where nothing else tells one."""
    if verdict.step is not None or verdict.format != "torch" or step_of(path.name) is not None:
        return verdict
    return dataclasses.replace(verdict, step=step_inside(path))
