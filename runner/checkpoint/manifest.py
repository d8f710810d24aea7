"""The manifest: the object that makes a checkpoint exist, and says what its bytes must be.

It is JSON that a person can read: one line per file. A manifest that comes from a store is hostile until
:func:`parse_manifest` has seen it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol, TypeVar, cast

from runner.checkpoint.formats import is_never
from runner.checkpoint.layout import MANIFEST_NAME, parse_checkpoint_id
from runner.core.state import Checkpoint, Environment
from runner.errors import CorruptData

VERSION = 1
PART_SIZE = 16 * 1024 * 1024
MAX_BYTES = 256 * 1024 * 1024

THREADS, CPU = "OMP_NUM_THREADS", "cpu"

Kind = Literal["file", "folder"]
_HEX64 = re.compile(r"[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_Value = TypeVar("_Value", str, int, list[object], dict[str, object])


class Entry(Protocol):
    """Anything that says a file's path, size and modification time."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. ``path`` is relative to the checkpoint's folder (a checkpoint of kind ``file``: its own name).

    blake3    of the whole file, 64 hex digits
    crc32c    of each part of ``part_size`` bytes, the last one may be shorter; empty for an empty file
    """

    path: str
    size: int
    mtime_ns: int
    blake3: str
    part_size: int
    crc32c: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint.

    name           the trainer's own name for it, relative to the checkpoint folder
    created_at     of the commit, epoch seconds
    environment    what bit-exact resume depends on: ``OMP_NUM_THREADS``, and ``cpu`` where the trainer told it
    metrics        what the trainer measured at this step, by name
    epoch          of the lease that its writer held, 0 where there was none
    """

    job: str
    run: int
    attempt: int
    attempt_id: str
    id: str
    step: int
    name: str
    kind: Kind
    format: str
    created_at: float
    spec_digest: str
    world_size: int
    tool_version: str
    host: str
    environment: Mapping[str, str]
    files: tuple[FileEntry, ...]
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    version: int = field(default=VERSION)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def signature(entries: Iterable[Entry]) -> str:
    """Equal for two checkpoints exactly when paths, sizes and modification times of all files are equal."""
    rows = sorted((entry.path, entry.size, entry.mtime_ns) for entry in entries)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def to_checkpoint(manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        id=manifest.id,
        step=manifest.step,
        name=manifest.name,
        attempt=manifest.attempt,
        files=len(manifest.files),
        bytes=manifest.bytes,
        signature=signature(manifest.files),
        time=manifest.created_at,
        epoch=manifest.epoch,
        metrics=tuple(sorted(manifest.metrics.items())),
        environment=_of_the_trainer(manifest),
    )


def _of_the_trainer(manifest: Manifest) -> Environment | None:
    """Only what a trainer told of itself is sure: a world of one is also what we write of those that say nothing."""
    if CPU not in manifest.environment:
        return None
    threads = manifest.environment.get(THREADS, "")
    return Environment(
        manifest.world_size, int(threads) if threads.isdecimal() else None, manifest.environment[CPU] or None
    )


def to_bytes(manifest: Manifest) -> bytes:
    """The same bytes for the same manifest: keys and files sorted, one line per key and per file."""
    head = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest) if f.name != "files"}
    head |= {"environment": dict(manifest.environment), "metrics": dict(manifest.metrics)}
    files = sorted(manifest.files, key=lambda entry: entry.path)
    rows = ",\n".join("  " + json.dumps(dataclasses.asdict(entry), sort_keys=True) for entry in files)
    lines = [f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(head.items())]
    return ("{\n" + ",\n".join([*lines, f' "files": [\n{rows}\n ]']) + "\n}\n").encode()


def parse_manifest(data: bytes) -> Manifest:
    """Raises CorruptData, with the reason, for anything but a manifest that this module could have written.

    A parsed manifest is safe to act on: its paths stay inside the checkpoint's folder, and its sums add up.
    """
    raw = _load(data)
    if raw.get("version") != VERSION:
        _refuse(f"format version {raw.get('version')!r} is not {VERSION}")
    files = tuple(_file(entry) for entry in _get(raw, "files", list))
    manifest = Manifest(
        job=_text(raw, "job"),
        run=_count(raw, "run", least=1),
        attempt=_count(raw, "attempt", least=1),
        attempt_id=_text(raw, "attempt_id"),
        id=_text(raw, "id"),
        step=_count(raw, "step"),
        name=_checkpoint_name(raw),
        kind=_kind(raw),
        format=_text(raw, "format"),
        created_at=_time(raw, "created_at"),
        spec_digest=_text(raw, "spec_digest"),
        world_size=_count(raw, "world_size", least=1),
        tool_version=_text(raw, "tool_version"),
        host=_text(raw, "host"),
        environment=_environment(raw),
        files=files,
        epoch=_count(raw, "epoch") if "epoch" in raw else 0,
        metrics=_metrics(raw) if "metrics" in raw else {},
    )
    _agree(manifest)
    return manifest


def check_path(path: str) -> str:
    """``path`` if it is a plain relative path that stays below its folder; raises CorruptData otherwise."""
    if not path or len(path) > 4096 or _CONTROL.search(path):
        _refuse(f"{path[:200]!r} is no path")
    if any(part in ("", ".", "..") or len(part.encode()) > 255 for part in path.split("/")):
        _refuse(f"{path[:200]!r} is not a plain relative path")
    return path


def _load(data: bytes) -> dict[str, object]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        _refuse(f"not JSON ({type(error).__name__})")
    if not isinstance(raw, dict):
        _refuse("not a JSON object")
    return cast("dict[str, object]", raw)


def _refuse(reason: str) -> NoReturn:
    raise CorruptData(f"bad manifest: {reason}")


def _get(raw: dict[str, object], key: str, kind: type[_Value]) -> _Value:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        _refuse(f"{key} is not of type {kind.__name__}")
    return value


def _text(raw: dict[str, object], key: str) -> str:
    value = _get(raw, key, str)
    if len(value) > 4096 or _CONTROL.search(value):
        _refuse(f"{key} holds what no name holds")
    return value


def _count(raw: dict[str, object], key: str, *, least: int = 0) -> int:
    value = _get(raw, key, int)
    if not least <= value < 2**63:
        _refuse(f"{key} is out of range")
    return value


def _time(raw: dict[str, object], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        _refuse(f"{key} is no time")
    return float(value)


def _kind(raw: dict[str, object]) -> Kind:
    kind = _text(raw, "kind")
    if kind not in ("file", "folder"):
        _refuse(f"kind {kind[:20]!r} is neither file nor folder")
    return "file" if kind == "file" else "folder"


def _checkpoint_name(raw: dict[str, object]) -> str:
    name = check_path(_get(raw, "name", str))
    if any(is_never(part) for part in name.split("/")):
        _refuse(f"no checkpoint has the name {name[:200]!r}")
    return name


def _environment(raw: dict[str, object]) -> dict[str, str]:
    environment = _get(raw, "environment", dict)
    return {str(key): _text(environment, key) for key in environment}


def _metrics(raw: dict[str, object]) -> dict[str, float]:
    told = _get(raw, "metrics", dict)
    good = {
        name: float(value)
        for name, value in told.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    if len(good) != len(told) or any(_CONTROL.search(name) for name in good):
        _refuse("a metric is no number")
    return good


def _file(raw: object) -> FileEntry:
    if not isinstance(raw, dict):
        _refuse("a file is not a JSON object")
    entry = FileEntry(
        path=check_path(_get(raw, "path", str)),
        size=_count(raw, "size"),
        mtime_ns=_count(raw, "mtime_ns", least=-(2**63)),
        blake3=_text(raw, "blake3"),
        part_size=_count(raw, "part_size", least=1),
        crc32c=_sums(_get(raw, "crc32c", list)),
    )
    if not _HEX64.fullmatch(entry.blake3):
        _refuse(f"{entry.path!r} has no blake3 digest")
    if len(entry.crc32c) != -(-entry.size // entry.part_size):
        _refuse(f"{entry.path!r} has not one crc32c for every part")
    return entry


def _sums(values: list[object]) -> tuple[int, ...]:
    good = [value for value in values if type(value) is int and 0 <= value < 2**32]
    if len(good) != len(values):
        _refuse("a crc32c is not a 32-bit number")
    return tuple(good)


def _agree(manifest: Manifest) -> None:
    """Refuse a manifest whose parts contradict one another."""
    name = parse_checkpoint_id(manifest.id)
    if name is None or (name.step, name.attempt, name.attempt_id) != (
        manifest.step,
        manifest.attempt,
        manifest.attempt_id,
    ):
        _refuse(f"id {manifest.id[:80]!r} does not fit step and attempt")
    paths = [file.path for file in manifest.files]
    if not paths:
        _refuse("it lists no files")
    if manifest.kind == "file" and paths != [manifest.name.rpartition("/")[2]]:
        _refuse("a checkpoint of kind file must list exactly that file")
    _no_clash(paths)


def _no_clash(paths: list[str]) -> None:
    """No path twice, none that is also another's folder, none in the manifest's own place."""
    taken = set(paths)
    if len(taken) != len(paths):
        _refuse("it lists a path twice")
    if MANIFEST_NAME in taken:
        _refuse("it lists itself")
    for path in paths:
        parents = path.split("/")[:-1]
        if any("/".join(parents[: end + 1]) in taken for end in range(len(parents))):
            _refuse(f"{path!r} lies below another file")
