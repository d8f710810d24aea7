"""How far the upload of a checkpoint is, kept on this disk: after a crash the next supervisor goes on from there."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint.digest import Digest
from runner.files import write_atomically
from runner.storage.api import ObjectInfo
from runner.storage.local import current
from runner.storage.transfer_note import this_boot


@dataclass(frozen=True, slots=True)
class UploadNotes:
    """A folder with one note for each file, and one that says which checkpoint they are about.

    Notes only spare work: what cannot be written down, on a full disk, must not stop an upload.
    """

    folder: Path

    def id_for(self, run: int, signature: str) -> str | None:
        """The id under which an upload of the same files has begun; None where there is none."""
        told = _read(self.folder / "checkpoint.json")
        return str(told["id"]) if (told.get("run"), told.get("signature")) == (run, signature) else None

    def begin(self, run: int, signature: str, checkpoint: str) -> None:
        """From now on the notes are about this checkpoint; what was noted of another one goes."""
        if self.id_for(run, signature) != checkpoint:
            self.end()
        about = {"run": run, "signature": signature, "id": checkpoint}
        with suppress(OSError):
            write_atomically(self.folder / "checkpoint.json", json.dumps(about).encode())

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def under_way(self, key: str) -> Path:
        """The note that the store may keep of the upload of ``key``."""
        return self.folder / f"{_name(key)}.parts"

    def note_done(self, key: str, source: Path, sent: ObjectInfo, sums: Digest) -> None:
        """The object is complete and is exactly the file as it is now."""
        row = {**_about(key, source), "version": sent.version, "blake3": sums.blake3, "crc32c": sums.crc32c}
        with suppress(OSError):
            write_atomically(self.folder / f"{_name(key)}.done", json.dumps(row).encode())

    def done(self, key: str, source: Path, there: ObjectInfo | None) -> Digest | None:
        """The digest of ``source`` when all of it is in the store already and neither has changed since."""
        told = _read(self.folder / f"{_name(key)}.done")
        about = {**_about(key, source), "version": there.version if there is not None else None}
        if not told or {name: told.get(name) for name in about} != about:
            return None
        return Digest(str(told["blake3"]), tuple(told["crc32c"]))


def _about(key: str, source: Path) -> dict[str, Any]:
    return {"key": key, "source": str(source), "seen": list(current(source) or ()), "boot": this_boot()}


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    """A note; empty where there is none, or it says nothing: then the work is done again."""
    with suppress(FileNotFoundError, ValueError):
        told = json.loads(path.read_bytes())
        return told if isinstance(told, dict) else {}
    return {}
