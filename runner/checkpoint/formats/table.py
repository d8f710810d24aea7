"""Is this file or folder a complete checkpoint, and whose? Told from names and structure alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from runner.checkpoint.formats.accelerate import Accelerate
from runner.checkpoint.formats.composer import Composer
from runner.checkpoint.formats.content import content_of, content_of_member
from runner.checkpoint.formats.dcp import Dcp
from runner.checkpoint.formats.deepspeed import DeepSpeed
from runner.checkpoint.formats.entry import Entry, Format, Pointer, Verdict, walk, whole_number
from runner.checkpoint.formats.faults import BrokenError, NoCheckpointError
from runner.checkpoint.formats.lightning import Lightning
from runner.checkpoint.formats.megatron import Megatron
from runner.checkpoint.formats.mmengine import MmEngine
from runner.checkpoint.formats.names import SUFFIXES, TEMPORARY, step_of
from runner.checkpoint.formats.plain import Any, Folder, OldTorch, Safetensors, Torch
from runner.checkpoint.formats.training import Training
from runner.checkpoint.formats.transformers import STATE, Transformers
from runner.checkpoint.formats.ultralytics import Ultralytics

FORMATS = (
    "auto", "torch", "dcp", "transformers", "lightning", "accelerate", "deepspeed", "ultralytics", "composer", "any",
)  # fmt: skip
"""What a job spec may ask for."""

# The first that claims an entry has it. Those that look at names of their own come before the general ones.
_FILES: tuple[Format, ...] = (Composer(), MmEngine(), Lightning(), Ultralytics(), Torch(), OldTorch(), Safetensors())
_FOLDERS: tuple[Format, ...] = (
    Training(), Transformers(), Accelerate(), DeepSpeed(), Lightning(), Composer(), Megatron(), Dcp(), Folder(),
)  # fmt: skip
_ASKED_FILES = {"lightning": Lightning(), "ultralytics": Ultralytics(), "composer": Composer()}
_ASKED_FOLDERS = {
    "dcp": Dcp(), "transformers": Transformers(), "lightning": Lightning(), "accelerate": Accelerate(),
    "deepspeed": DeepSpeed(), "composer": Composer(),
}  # fmt: skip
_LAST_WRITTEN = frozenset({".metadata", STATE})


def judge(path: Path, format: str = "auto") -> Verdict:  # noqa: A002 (the word of the spec)
    """The verdict on a file or folder, under one of :data:`FORMATS`. Never raises for what it finds there."""
    try:
        return _judge_folder(path, format) if path.is_dir() else _judge_file(path, format)
    except NoCheckpointError as reason:
        return _other(str(reason))
    except BrokenError as fault:
        return Verdict(complete=False, format=_meant(path), reason=str(fault))
    except OSError as error:
        return Verdict(complete=False, format=_meant(path), reason=f"cannot be read: {error.strerror}")


def pointer_to(path: Path) -> Pointer | None:
    """What must lead to a complete checkpoint, where its trainer takes no path but looks for its newest one."""
    try:
        entry = _folder(path) if path.is_dir() else _file(path)
    except (BrokenError, OSError):
        return None
    known = _claiming(entry, _FOLDERS if entry.is_dir else _FILES)
    return known.pointer(path) if known is not None else None


def may_be_checkpoint(folder: Path, format: str) -> bool:  # noqa: A002 (the word of the spec)
    """What a folder's own name, or one at its top, suggests: told without a walk, which in a data folder takes long."""
    if format == "any" or step_of(folder.name) is not None or folder.name.endswith(".ckpt"):
        return True
    with os.scandir(folder) as entries:
        return any(entry.name in _LAST_WRITTEN or entry.name.lower().endswith(SUFFIXES) for entry in entries)


def _meant(path: Path) -> str:
    """What a broken entry was meant to be, by its name."""
    if path.is_dir():
        return "folder"
    name = path.name.lower()
    if name.endswith(".safetensors"):
        return "safetensors"
    bare_step = "." not in name and step_of(name) is not None
    return "torch" if bare_step or name.endswith(SUFFIXES) else "other"


def _verdict(known: Format, entry: Entry) -> Verdict:
    proof = known.check(entry)
    return Verdict(complete=True, format=known.name, proof=proof, step=whole_number(known.step(entry)))


def _other(reason: str) -> Verdict:
    return Verdict(complete=False, format="other", reason=reason)


def _claiming(entry: Entry, known: Sequence[Format]) -> Format | None:
    return next((one for one in known if one.claims(entry)), None)


# ---- files


def _file(path: Path) -> Entry:
    return Entry(path, is_dir=False, contents={path.name: content_of(path)})


def _judge_file(path: Path, wanted: str) -> Verdict:
    entry = _file(path)
    asked = _ASKED_FILES.get(wanted)
    if wanted in _ASKED_FOLDERS and asked is None:
        return _other(f"is not a folder, as format {wanted} asks")
    if (asked is not None and not entry.has_kind("torch")) or (
        wanted == "torch" and not entry.has_kind("torch", "pickle")
    ):
        return _other(f"is not a torch file, as format {wanted} asks")
    known = asked or _claiming(entry, (*_FILES, Any()) if wanted == "any" else _FILES)
    return _verdict(known, entry) if known is not None else _other("is neither a torch file nor safetensors")


# ---- folders


def _folder(path: Path) -> Entry:
    """Raises BrokenError, before it opens anything, when a name says that the save has not ended."""
    members = list(walk(path))
    _check_names(name for name, _ in members)
    sizes = {name: status.st_size for name, status in members if not name.endswith("/")}
    return Entry(path, is_dir=True, sizes=sizes, contents={name: content_of_member(path, name) for name in sizes})


def _judge_folder(path: Path, wanted: str) -> Verdict:
    if not may_be_checkpoint(path, wanted):
        return _other("is a folder without checkpoint files")
    entry = _folder(path)
    if not entry.sizes:
        raise BrokenError("is an empty folder")
    named = step_of(path.name) is not None or not _LAST_WRITTEN.isdisjoint(entry.sizes)
    if wanted != "any" and not named and not entry.has_kind("torch", "pickle", "safetensors"):
        return _other("is a folder without checkpoint files: what ends in .bin there is data")
    if wanted in ("torch", "ultralytics") and not entry.has_kind("torch", "pickle"):
        return _other("is a folder without torch files")
    known = _ASKED_FOLDERS.get(wanted) or _claiming(entry, _FOLDERS)
    assert known is not None, "the last one claims every folder"
    return _verdict(known, entry)


def _check_names(members: Iterable[str]) -> None:
    for member in members:
        name = member.rstrip("/").rpartition("/")[2].lower()
        if name.startswith((".tmp", "tmp")) or name.endswith(TEMPORARY) or "incomplete" in name:
            raise BrokenError(f"{member} says that the save has not ended")
