"""Megatron-LM: ``iter_0000100/``, and a text file that names the newest one."""

from __future__ import annotations

import re
from pathlib import Path

from runner.checkpoint.formats.dcp import check_shards
from runner.checkpoint.formats.entry import Entry, Format, Pointer, Proof

_NAME = re.compile(r"iter_(\d{7,})")


class Megatron(Format):
    """A folder of shards; or, in the old format, of one torch file for each rank, which does not tell how many."""

    name = "megatron"

    def claims(self, entry: Entry) -> bool:
        return entry.is_dir and _NAME.fullmatch(entry.name) is not None

    def check(self, entry: Entry) -> Proof:
        return check_shards(entry) if ".metadata" in entry.sizes else min(check_shards(entry), Proof.NOTHING)

    def pointer(self, path: Path) -> Pointer | None:
        found = _NAME.fullmatch(path.name)
        return Pointer("latest_checkpointed_iteration.txt", str(int(found[1]))) if found else None
