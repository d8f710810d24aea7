"""What is asked of those who bring files, and what they answer: values that may go to another process and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from runner.core.diff import Wanted


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


def as_exception(error: BaseException) -> Exception:
    """The error as a value that another thread can raise: what is more than an exception must not end that one."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
