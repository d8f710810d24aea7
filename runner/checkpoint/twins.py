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


@dataclass(frozen=True, slots=True)
class Twins:
    """The files of ``earlier`` checkpoints, newest first.

    Whether a file is the same is proved by its digest, which costs a reading; if it is not, it was one reading too
    many. So only those are looked at that cost little, that were not written anew, or that did not change last time.
    """

    layout: StoreLayout
    run: int
    earlier: Sequence[Manifest]

    def of(self, file: LocalFile) -> Twin | None:
        before = [entry for manifest in self.earlier for entry in manifest.files if entry.path == file.path]
        if not before or before[0].size != file.size or not file.size or not self._may_be(file, before):
            return None
        manifest = next(one for one in self.earlier if before[0] in one.files)
        return Twin(self.layout.checkpoint_prefix(self.run, manifest.id) + file.path, before[0].blake3)

    def _may_be(self, file: LocalFile, before: list[FileEntry]) -> bool:
        untouched = file.mtime_ns == before[0].mtime_ns
        steady = len(before) > 1 and before[0].blake3 == before[1].blake3
        return file.size <= CHEAP_TO_READ or untouched or steady
