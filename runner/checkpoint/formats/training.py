"""What ``runner.training`` saves: ``state.safetensors``, more for other ranks, and ``state.json`` that lists them."""

from __future__ import annotations

from contextlib import suppress

from runner.checkpoint.formats.entry import Entry, Format, Proof, read_json, whole_number
from runner.checkpoint.formats.faults import BrokenError

STATE = "state.json"
_TENSORS = "state.safetensors"
_NAME = "cloudrun-training"


class Training(Format):
    """Complete when every file is as long as ``state.json`` says."""

    name = _NAME

    def claims(self, entry: Entry) -> bool:
        return _TENSORS in entry.sizes or (STATE in entry.sizes and _is_ours(entry))

    def check(self, entry: Entry) -> Proof:
        if STATE not in entry.sizes:
            raise BrokenError(f"has no {STATE}, which is written last")
        files = read_json(entry.path / STATE).get("files")
        if not isinstance(files, dict) or not files:
            raise BrokenError(f"{STATE} lists no files")
        for name, size in files.items():
            if entry.sizes.get(name) != size:
                there = "is missing" if name not in entry.sizes else f"is not as long as {STATE} says"
                raise BrokenError(f"{name} {there}")
        return Proof.WHOLE

    def step(self, entry: Entry) -> int | None:
        return whole_number(read_json(entry.path / STATE).get("step"))


def _is_ours(entry: Entry) -> bool:
    """Other trainers have files of that name, too."""
    with suppress(BrokenError):
        return read_json(entry.path / STATE).get("format") == _NAME
    return False
