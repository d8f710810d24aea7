"""What is written down of a lease: in the store for everybody, on this disk for ourselves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.errors import ObjectMissing
from runner.files import write_atomically
from runner.storage.api import ObjectStore

VERSION = 1
PERIOD = 20.0
"""Seconds within which a dead holder is followed."""

LONGEST_PERIOD = 3600.0
NOBODY_KNOWN = "a machine whose lease cannot be read"


@dataclass(frozen=True, slots=True)
class Waiter:
    """A supervisor that stands by. ``beat`` counts its signs of life."""

    id: str
    host: str
    beat: int = 0


@dataclass(frozen=True, slots=True)
class Body:
    """What the lease object says.

    period    seconds: the holder renews it several times in each
    at        epoch seconds by the holder's clock, when it was taken: for people only
    renewed   counts the holder's writes: while it grows the holder lives
    """

    holder: str
    host: str
    epoch: int
    period: float
    at: float
    renewed: int = 0
    released: bool = False
    standby: tuple[Waiter, ...] = ()

    @property
    def sign_of_life(self) -> tuple[str, int, int]:
        return self.holder, self.epoch, self.renewed

    def to_bytes(self) -> bytes:
        return (json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n").encode()


def parse_body(data: bytes) -> Body:
    """What cannot be read is a lease like any other, of a holder whom nobody knows: it expires."""
    try:
        body = _body(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return Body(data[:40].hex(), NOBODY_KNOWN, 0, PERIOD, 0.0)
    sane = 0 < body.period <= LONGEST_PERIOD and 0 <= body.epoch < 2**62 and math.isfinite(body.at)
    return body if sane else Body(body.holder, body.host, 0, PERIOD, 0.0, body.renewed, body.released)


def _body(raw: Mapping[str, Any]) -> Body:
    return Body(
        holder=str(raw["holder"]),
        host=str(raw["host"]),
        epoch=int(raw["epoch"]),
        period=float(raw["period"]),
        at=float(raw["at"]),
        renewed=int(raw["renewed"]),
        released=raw["released"] is True,
        standby=tuple(Waiter(str(one["id"]), str(one["host"]), int(one["beat"])) for one in raw["standby"]),
    )


def look_at(store: ObjectStore, key: str) -> tuple[Body, str] | None:
    """The lease as it is now, and its version; None when there is none."""
    try:
        data, version = store.look(key)
    except ObjectMissing:
        return None
    return parse_body(data), version


def read_body(store: ObjectStore, key: str) -> Body | None:
    """The lease as it is now; None when there is none."""
    looked = look_at(store, key)
    return looked[0] if looked else None


@dataclass(frozen=True, slots=True)
class Note:
    """What this machine remembers of its own time as the holder.

    holder      its last session. A lease of that one is free: two sessions never share a machine
    host        the machine's name, since several may share a disk
    epoch       of checkpoints that lie here and are not stored; None before this machine has ever held a lease
    base        (epoch, step) of the newest checkpoint when that epoch began: what is behind it did not follow from it
    leftovers   the epochs of those that lay here already then, by signature
    """

    holder: str = ""
    host: str = ""
    epoch: int | None = None
    base: tuple[int, int] = (0, -1)
    leftovers: Mapping[str, int] = field(default_factory=dict)


def read_note(path: Path) -> Note:
    """A note that cannot be read is none: then this machine waits as any other does."""
    try:
        raw = json.loads(path.read_bytes())
        note = Note(
            holder=str(raw["holder"]),
            host=str(raw["host"]),
            epoch=None if raw["epoch"] is None else int(raw["epoch"]),
            base=(int(raw["base"][0]), int(raw["base"][1])),
            leftovers={str(key): int(value) for key, value in raw["leftovers"].items()},
        )
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return Note()
    return note


def write_note(path: Path, note: Note) -> None:
    write_atomically(path, json.dumps(asdict(note)).encode())


def sign_note(path: Path, holder: str, host: str) -> None:
    """A session has the lease now. What it says of checkpoints stays true until the session has looked at them."""
    write_note(path, replace(read_note(path), holder=holder, host=host))
