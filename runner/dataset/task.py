"""What is asked of those who bring files, and what they answer: values that may go to another process and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runner.core.diff import Wanted
from runner.errors import CloudrunError
from runner.storage.api import ObjectStore
from runner.storage.retrying import Retry

Opening = Callable[[Retry], ObjectStore]
"""How to open a store; can be sent to another process."""


@dataclass(frozen=True, slots=True)
class Check:
    """Read the file that is there again, and compare. ``crc32c`` is 8 hex digits."""

    wanted: Wanted
    crc32c: str

    @property
    def key(self) -> str:
        return self.wanted.key


Task = Wanted | Check
"""Fetch, or check."""


class Recorded(NamedTuple):
    """A file that was fetched and checked: where from, and what it looks like here. ``crc32c`` is 8 hex digits."""

    path: str
    key: str
    size: int
    version: str
    mtime_ns: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found."""

    wanted: Wanted
    sound: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that raised ``error``."""

    key: str
    error: Exception


Outcome = Recorded | Checked | Failure


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker has to know: how to open the store, for how many seconds to try again, where files go."""

    opening: Opening
    patience: float
    files: Path
    parts: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Retrying:
    """The store failed; the next try comes in ``wait`` seconds."""

    operation: str
    error: CloudrunError
    wait: float


Message = list[Outcome] | Retrying
"""What a worker sends."""
