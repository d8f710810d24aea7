"""A private copy of a checkpoint that its trainer may write anew before it is uploaded.

Where the file system lets files share their blocks (XFS, Btrfs and others) a copy costs nothing and is always taken.
Elsewhere it is written for what may be written anew in place, when it is small or was renewed quickly. Never a hard
link: that would be written anew as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import replace
from pathlib import Path

from runner.checkpoint.formats import judge, step_of
from runner.checkpoint.local import Found, LocalFile, delete, is_unchanged, place_of
from runner.errors import SourceChanged
from runner.files import make_directory
from runner.storage.local import UNSUPPORTED, copy_bytes, free_bytes

FICLONE = 0x40049409
SMALL = 256 << 20
"""Bytes that are copied without asking how often they are renewed."""
QUICKLY_S = 600.0
"""A name that is renewed within this time may be gone before its upload has come to an end."""
CHECKPOINTS_AHEAD = 2
"""Room for so many more must be left: a trainer writes the next one before it deletes an old one."""


class PrivateCopies:
    """At most two: of the newest checkpoint, and of the one that is being uploaded. Not for several threads at once.

    ``folder`` is on the checkpoints' file system; what an earlier life left in it goes.
    """

    def __init__(self, folder: Path, format: str) -> None:  # noqa: A002 (the word of the spec)
        self._folder = folder
        self._format = format
        self._newest: Found | None = None
        self._lent: Found | None = None
        self._told: dict[str, Found] = {}
        self._number = 0
        delete(folder)

    def take(self, found: Found) -> None:
        """Copy what was just found complete, where that is worth it and there is room; the one before it goes."""
        before, self._told[found.name] = self._told.get(found.name), found
        before_it, self._newest = self._newest, self._copied(found, before)
        self._drop(before_it)

    def lend(self, signature: str) -> Found | None:
        """The copy of the checkpoint with this signature; it stays until it is given back, or another is lent."""
        for copy in (self._lent, self._newest):
            if copy is not None and copy.signature == signature:
                lent_before, self._lent = self._lent, copy
                self._drop(lent_before)
                return copy
        return None

    def give_back(self, signature: str) -> None:
        """The checkpoint is stored: nobody needs its copy any more."""
        for copy in {id(one): one for one in (self._lent, self._newest) if one is not None}.values():
            if copy.signature == signature:
                self._lent = None if self._lent is copy else self._lent
                self._newest = None if self._newest is copy else self._newest
                self._drop(copy)

    def _drop(self, copy: Found | None) -> None:
        if copy is not None and copy is not self._newest and copy is not self._lent:
            delete(self._room_of(copy))

    def _room_of(self, copy: Found) -> Path:
        return self._folder / copy.path.relative_to(self._folder).parts[0]

    def _copied(self, found: Found, before: Found | None) -> Found | None:
        self._number += 1
        room = self._folder / str(self._number)
        copy = replace(found, path=room / found.path.name)
        try:
            make_directory(room)
            done = self._fill(copy, found, before)
        except (OSError, SourceChanged):
            # No room, or it is being written anew already: the upload reads the trainer's own files, and finds out.
            done = False
        if not done:
            delete(room)
        return copy if done else None

    def _fill(self, copy: Found, found: Found, before: Found | None) -> bool:
        """False where it is not worth it, or the copy is not exactly what was found."""
        shared = _shares_blocks(found, copy.path.parent / "probe")
        if not shared and not _is_worth_writing(found, before, free_bytes(self._folder)):
            return False
        for file in found.files:
            _copy(found, copy, file, shared=shared)
        return is_unchanged(found) and judge(copy.path, self._format).complete


def _is_worth_writing(found: Found, before: Found | None, free: int) -> bool:
    renewed = before is not None and before.signature != found.signature
    if not renewed and step_of(found.path.name) is not None:
        return False
    quickly = before is not None and renewed and found.newest_mtime - before.newest_mtime <= QUICKLY_S
    return (found.bytes <= SMALL or quickly) and free >= (1 + CHECKPOINTS_AHEAD) * found.bytes


def _shares_blocks(found: Found, probe: Path) -> bool:
    """True where the file system can let two files share their blocks; found out with the largest one."""
    largest = max(found.files, key=lambda file: file.size)
    with open(place_of(found.path, found.is_dir, largest.path), "rb") as source, open(probe, "wb") as target:
        probe.unlink()
        return _clone(source.fileno(), target.fileno())


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError as error:
        # Also what a file system answers that has never heard of it.
        if error.errno in UNSUPPORTED or error.errno == errno.ENOTTY:
            return False
        raise
    return True


def _copy(found: Found, copy: Found, file: LocalFile, *, shared: bool) -> None:
    source_path = place_of(found.path, found.is_dir, file.path)
    target_path = place_of(copy.path, found.is_dir, file.path)
    target_path.parent.mkdir(parents=True, exist_ok=True)
    with open(source_path, "rb") as source, open(target_path, "wb") as target:
        if not (shared and _clone(source.fileno(), target.fileno())):
            copied = copy_bytes(source.fileno(), target.fileno(), file.size)
            if copied != file.size:
                raise SourceChanged(f"{source_path} became shorter while it was copied")
    os.utime(target_path, ns=(file.mtime_ns, file.mtime_ns))
