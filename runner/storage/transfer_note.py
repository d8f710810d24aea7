"""How far a long transfer is, written down beside it, so that another process can go on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.files import write_atomically

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_boot() -> str:
    """Names the time since the machine started: what a file was given before may have been lost with the page cache."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


class TransferNote:
    """A file with one line that says what is transferred, and one for each piece that has arrived.

    It only spares work: what cannot be written down, on a full disk, must not stop the transfer.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """``about`` is everything that must be the same for the pieces to be of use."""
        self._path = path
        self._about = {**about, "boot": this_boot()}

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """What was said at the beginning, and the pieces; None when this note is about something else."""
        lines = list(_lines(self._path))
        if not lines or {key: lines[0].get(key) for key in self._about} != self._about:
            return None
        return lines[0], lines[1:]

    def begin(self, more: Mapping[str, Any]) -> None:
        """Start anew, with what else must be remembered."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            write_atomically(self._path, _line({**self._about, **more}))

    def add(self, piece: Mapping[str, Any]) -> None:
        # Appended by the system, since several threads add; not made anew: pieces without a beginning say nothing.
        with suppress(OSError), open(self._path, "ab", 0, opener=_existing) as file:
            file.write(_line(piece))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, up to the first that a crash cut short."""
    with suppress(FileNotFoundError, ValueError), open(path, "rb") as file:
        for line in file:
            row = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(row, dict):
                return
            yield row
