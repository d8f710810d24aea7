"""What every format is asked about, and what it answers."""

from __future__ import annotations

import enum
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from runner.checkpoint.formats.content import Content
from runner.checkpoint.formats.faults import BrokenError
from runner.files import is_hidden

MAX_SMALL = 64 * 1024 * 1024


class Proof(enum.IntEnum):
    """What a complete structure says about its writer; the least of several counts.

    NOTHING  more files may come: it must have been quiet for a while
    LAST     what its trainer writes last is there; other processes of the trainer may still be writing theirs, so it
             counts once they have gone, or have been quiet for a while
    WHOLE    it has finished: nothing comes after what is there
    """

    NOTHING = 0
    LAST = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the bytes of a file or folder say.

    complete   nothing is missing, as far as its structure tells
    format     whose it is (:attr:`Format.name`); ``other`` where it is no checkpoint at all
    reason     why it is not complete; empty when it is
    step       the step that the format's own files tell, where they do
    """

    complete: bool
    format: str
    reason: str = ""
    proof: Proof = Proof.WHOLE
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder that may be a checkpoint.

    sizes     of a folder: path below it -> bytes, of every file
    contents  what the files hold, by the same paths; of a file: under its name. Empty until they were looked into
    """

    path: Path
    is_dir: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    contents: Mapping[str, Content] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def content(self) -> Content:
        """Of a file."""
        return self.contents[self.name]

    def has_kind(self, *kinds: str) -> bool:
        return any(content.kind in kinds for content in self.contents.values())


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file beside a checkpoint in which a trainer looks up its newest one. A link's ``text`` is its target."""

    name: str
    text: str
    is_link: bool = False


class Format:
    """One trainer's checkpoints. Three questions: which are complete, which step, how to resume.

    ``name`` is what job specs and manifests call it.
    """

    name: ClassVar[str]

    def claims(self, entry: Entry) -> bool:
        """True when names and content say that it is this trainer's, complete or not."""
        raise NotImplementedError

    def check(self, entry: Entry) -> Proof:
        """Raises BrokenError, with the reason, when something is missing. Every single file is known to be whole."""
        raise NotImplementedError

    def step(self, entry: Entry) -> int | None:  # noqa: ARG002 - for those that tell one
        """The step that the checkpoint's own files tell."""
        return None

    def pointer(self, path: Path) -> Pointer | None:  # noqa: ARG002 - for those that have one
        """What must lead to ``path``, for a trainer that takes no path but looks for its newest one."""
        return None


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file below ``folder`` (path relative to it, its stat), and every folder (path ends in ``/``).

    Links to files are followed, links to folders are not; sockets, devices and pipes are left out, and what no store
    takes (:func:`runner.files.is_hidden`). Raises OSError for what cannot be read, also for a link that leads nowhere.
    """
    yield from _walk(str(folder), "")


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        ordered = sorted((entry for entry in entries if not is_hidden(entry.name)), key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            yield f"{prefix}{entry.name}/", entry.stat(follow_symlinks=False)
            yield from _walk(entry.path, f"{prefix}{entry.name}/")
            continue
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            yield prefix + entry.name, status


def read_json(path: Path) -> dict[str, object]:
    """A small file of a trainer's. Raises BrokenError when it is not a whole JSON object."""
    try:
        raw = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_SMALL else None
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"{path.name} is not whole") from error
    if not isinstance(raw, dict):
        raise BrokenError(f"{path.name} is not what it should be")
    return raw


def whole_number(value: object) -> int | None:
    """``value`` where it is a step: a number from 0, and no bool."""
    return value if type(value) is int and value >= 0 else None
