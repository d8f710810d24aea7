"""Composer: ``ep3-ba120-rank0.pt`` and a link ``latest-rank0.pt``, by which it finds its newest one."""

from __future__ import annotations

import re
from pathlib import Path

from runner.checkpoint.formats.dcp import check_shards
from runner.checkpoint.formats.entry import Entry, Format, Pointer, Proof
from runner.checkpoint.formats.faults import BrokenError

_NAME = re.compile(r"ep\d+-ba\d+(?:-rank(\d+)\.pt)?")


class Composer(Format):
    """A whole torch file, or a folder of shards. Without the link, Composer silently starts from scratch."""

    name = "composer"

    def claims(self, entry: Entry) -> bool:
        return _NAME.fullmatch(entry.name) is not None and (entry.is_dir or entry.content.kind == "torch")

    def check(self, entry: Entry) -> Proof:
        if not entry.is_dir:
            return Proof.WHOLE
        if ".metadata" not in entry.sizes:
            raise BrokenError("has no .metadata")
        return check_shards(entry)

    def pointer(self, path: Path) -> Pointer | None:
        found = _NAME.fullmatch(path.name)
        return Pointer(f"latest-rank{found[1] or 0}.pt", path.name, is_link=True) if found else None
