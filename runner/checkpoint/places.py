"""Where a trainer's checkpoints lie: in one folder, or wherever a name matches one of several patterns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from runner.checkpoint.formats import is_never


@dataclass(frozen=True, slots=True)
class Places:
    """What lies below ``root`` and matches a pattern, such as ``runs/*/weights/*.pt``. A ``*`` matches no slash.

    Checkpoints are named by their path from ``root``, so that on every machine they come back to the same place.
    Links are never followed: what lies behind one could not be restored.
    """

    root: Path
    patterns: tuple[str, ...] = ("*",)

    def entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """(name, entry) of everything with a checkpoint's place, once, sorted by name. A missing folder is empty."""
        found: dict[str, os.DirEntry[str]] = {}
        for pattern in self.patterns:
            above, _, last = pattern.strip("/").rpartition("/")
            for folder in _below(self.root, above):
                found |= {f"{folder}{entry.name}": entry for entry in _children(self.root / folder, last)}
        yield from sorted(found.items())

    def folders(self) -> list[Path]:
        """The folders that hold checkpoints, or would."""
        above = {pattern.strip("/").rpartition("/")[0] for pattern in self.patterns}
        return [self.root / folder for one in sorted(above) for folder in _below(self.root, one)]


def _below(root: Path, pattern: str) -> Iterator[str]:
    """Relative paths, each with a slash at its end, of the folders that match; the empty pattern is the root."""
    if not pattern:
        yield ""
        return
    above, _, last = pattern.rpartition("/")
    for folder in _below(root, above):
        yield from (f"{folder}{entry.name}/" for entry in _children(root / folder, last) if _may_enter(entry))


def _may_enter(entry: os.DirEntry[str]) -> bool:
    """What a ``*`` matches may be somebody else's, such as ``lost+found``: it must not hide all the others."""
    return entry.is_dir() and os.access(entry.path, os.R_OK | os.X_OK)


def _children(folder: Path, pattern: str) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(folder) as listing:
        for entry in listing:
            if fnmatchcase(entry.name, pattern) and not is_never(entry.name) and not entry.is_symlink():
                yield entry
