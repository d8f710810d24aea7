"""torch.distributed.checkpoint, and the trainers that save with it: torchtitan, FSDP folders, Megatron's new format.

The shards come first and are synced; then ``.metadata`` is renamed into place. It names every shard, and where in it
each tensor lies.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from runner.checkpoint.formats.entry import MAX_SMALL, Entry, Format, Proof
from runner.checkpoint.formats.faults import BrokenError

_SHARD = re.compile(rb"__\d+_\d+\.distcp")
_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
# What a damaged pickle makes of the reader.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError,
    ImportError, MemoryError, RecursionError,
)  # fmt: skip


class Dcp(Format):
    """A folder with ``.metadata`` and all of its shards."""

    name = "dcp"

    def claims(self, entry: Entry) -> bool:
        return any("/" not in member and _is_part(member) for member in entry.sizes)

    def check(self, entry: Entry) -> Proof:
        if not any(_is_part(member) for member in entry.sizes):
            raise BrokenError("has no .metadata")
        return check_shards(entry)


def _is_part(member: str) -> bool:
    return member.endswith(".distcp") or member.rpartition("/")[2] == ".metadata"


def check_shards(entry: Entry) -> Proof:
    """Every folder of shards in ``entry``, at its top or below, must have its ``.metadata`` and all that it names."""
    folders = {member.rpartition("/")[0] for member in entry.sizes if _is_part(member)}
    proofs = [_check_folder(entry, f"{folder}/" if folder else "") for folder in sorted(folders)]
    return Proof.NOTHING if Proof.NOTHING in proofs else Proof.WHOLE


def ranks_of_shards(entry: Entry) -> int:
    """How many processes have written shards, at least; 0 where there are none."""
    ranks = [int(found[1]) + 1 for member in entry.sizes if (found := _RANK.fullmatch(member))]
    return max(ranks, default=0)


def _check_folder(entry: Entry, prefix: str) -> Proof:
    if f"{prefix}.metadata" not in entry.sizes:
        raise BrokenError(f"{prefix}.metadata is missing, which is written last")
    data = _metadata(entry.path / prefix / ".metadata", f"{prefix}.metadata")
    needed = _needed(data, f"{prefix}.metadata")
    # Who writes no such records is known by the names alone, and must be quiet.
    for shard, size in (needed or dict.fromkeys(_names(data), 0)).items():
        if entry.sizes.get(prefix + shard, -1) < size:
            there = "is missing" if prefix + shard not in entry.sizes else "is shorter than .metadata says"
            raise BrokenError(f"{prefix}{shard} {there}")
    return Proof.WHOLE if needed else Proof.NOTHING


def _metadata(path: Path, shown: str) -> bytes:
    if path.stat().st_size > MAX_SMALL:
        return b""
    data = path.read_bytes()
    if not data.endswith(b"."):
        raise BrokenError(f"{shown} does not end")
    return data


def _names(data: bytes) -> set[str]:
    return {name.decode() for name in _SHARD.findall(data)}


def _needed(data: bytes, shown: str) -> dict[str, int]:
    """Shard -> bytes that it must have at least. Empty where the metadata tells none."""
    if not data:
        return {}
    needed: dict[str, int] = {}
    for path, end in _records(_Outline(io.BytesIO(data)).outline(shown)):
        needed[path] = max(needed.get(path, 0), end)
    return needed


def _records(root: object) -> Iterator[tuple[str, int]]:
    storage = _state(root).get("storage_data")
    for record in storage.values() if isinstance(storage, dict) else ():
        match _state(record):
            case {"relative_path": str(path), "offset": int(offset), "length": int(length)}:
                yield path, offset + length


def _state(stub: object) -> dict[Any, Any]:
    state = getattr(stub, "state", None)
    return state if isinstance(state, dict) else {}


class _Stub:
    """Stands for whatever a pickle names. Nothing of it is imported, nothing of it runs."""

    def __new__(cls, *_args: object, **_named: object) -> Self:
        return object.__new__(cls)

    def __init__(self, *_args: object, **_named: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def add(self, item: object) -> None:
        pass


class _Outline(pickle.Unpickler):
    """Reads the shape of a pickle: dictionaries, texts, numbers, and stubs for all objects."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ARG002 - none of them is wanted
        return _Stub

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - see above
        return _Stub()

    def outline(self, shown: str) -> object:
        try:
            return self.load()
        except _DAMAGED as error:
            raise BrokenError(f"{shown} is damaged") from error
