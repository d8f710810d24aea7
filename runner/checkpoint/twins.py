"""Files that earlier checkpoints have as well: they are copied inside the store, not sent again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.checkpoint.layout import StoreLayout
from runner.checkpoint.local import LocalFile
from runner.checkpoint.manifest import FileEntry, Manifest

CHEAP_TO_READ = 16 << 20
"""Bytes up to which a file is read just to see whether it is the same again."""


@dataclass(frozen=True, slots=True)
class Twin:
    """An object of an earlier checkpoint that may be the same file."""

    key: str
    blake3: str


class Twins:
    """The files of ``earlier`` checkpoints, newest first.

    Whether a file is the same is proved by its digest, which costs a reading; if it is not, it was one reading too
    many. So only those are looked at that cost little, that were not written anew, or that did not change last time.
    """

    def __init__(self, layout: StoreLayout, run: int, earlier: Sequence[Manifest]) -> None:
        self._before: dict[str, list[tuple[str, FileEntry]]] = {}
        for manifest in earlier:
            prefix = layout.checkpoint_prefix(run, manifest.id)
            for entry in manifest.files:
                self._before.setdefault(entry.path, []).append((prefix + entry.path, entry))

    def of(self, file: LocalFile) -> Twin | None:
        before = self._before.get(file.path)
        if not before or not file.size:
            return None
        key, newest = before[0]
        untouched = file.mtime_ns == newest.mtime_ns
        steady = len(before) > 1 and newest.blake3 == before[1][1].blake3
        may_be = newest.size == file.size and (file.size <= CHEAP_TO_READ or untouched or steady)
        return Twin(key, newest.blake3) if may_be else None
