"""MMEngine: ``epoch_12.pth`` or ``iter_12.pth``, and a text file with the path of the newest one."""

from __future__ import annotations

import re
from pathlib import Path

from runner.checkpoint.formats.entry import Entry, Format, Pointer, Proof

_NAME = re.compile(r"(?:epoch|iter)_\d+\.pth")


class MmEngine(Format):
    """A whole torch file. The path in ``last_checkpoint`` breaks when the folder lies elsewhere: it is written anew."""

    name = "mmengine"

    def claims(self, entry: Entry) -> bool:
        return not entry.is_dir and _NAME.fullmatch(entry.name) is not None and entry.content.kind == "torch"

    def check(self, entry: Entry) -> Proof:  # noqa: ARG002 - a torch file proves itself
        return Proof.WHOLE

    def pointer(self, path: Path) -> Pointer:
        return Pointer("last_checkpoint", str(path))
