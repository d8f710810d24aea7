"""What an earlier sync left in an entry: parts that may be gone on with, and files that no record names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runner.core.diff import Wanted


def part_name(item: Wanted) -> str:
    """The name of an object's part file: the same in every process, so that a later one goes on with it."""
    return hashlib.sha256(f"{item.version}\n{item.key}".encode()).hexdigest()[:32]


def note_name(part: str) -> str:
    """The name of the file that tells how far the part is."""
    return f"{part}.note"


class Parts:
    """What an earlier sync left in ``parts``. ``on_disk`` counts the bytes of what can be gone on with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._useless: set[str] = set(os.listdir(folder)) if folder.is_dir() else set()
        self.on_disk = 0

    def keep(self, item: Wanted) -> None:
        """The part of this very version is for its fetcher: to be gone on with if there is a note, else to be begun
        again under the same name.
        """
        if not self._useless:
            return
        part = part_name(item)
        if {part, note_name(part)} <= self._useless:
            self.on_disk += (self._folder / part).stat().st_blocks * 512
        self._useless -= {part, note_name(part)}

    def remove_useless(self) -> None:
        for name in self._useless:
            with suppress(FileNotFoundError):
                (self._folder / name).unlink()
        self._useless = set()


def paths_below(folder: Path) -> Iterator[str]:
    """Everything below ``folder``, relative to it: files, links, and after what lies in it each folder, with a ``/`` at
    its end. What has been handed out may be removed meanwhile.
    """
    above = [("", os.scandir(folder))]
    while above:
        prefix, items = above[-1]
        item = next(items, None)
        if item is None:
            items.close()
            above.pop()
            if prefix:
                yield prefix
        elif item.is_dir(follow_symlinks=False):
            above.append((f"{prefix}{item.name}/", os.scandir(item.path)))
        else:
            yield prefix + item.name
