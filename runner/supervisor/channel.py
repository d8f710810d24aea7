"""The socket that a trainer may talk on: lines of JSON, one connection for each rank. One thread, which never waits.

Every line is an object with one key. A trainer says:

    {"hello": {"version": 1, "rank": 0, "world": 2, "pid": 123, "threads": 8, "cpu": "AVX512"}}      first, and once
    {"progress": {"step": 12, "total": 600, "loss": 1.5}}
    {"snapshot": {"slot": "rank0-0", "sequence": 7, "step": 12, "stall": 0.11, "metrics": {}, "reason": "cadence"}}
    {"saved": {"path": "step-12", "step": 12, "seconds": 1.8, "metrics": {"loss": 1.5}}}
    {"digest": {"step": 12, "value": "...", "kind": "sampled"}}
    {"remark": {"text": "..."}}

and hears:

    {"welcome": {"version": 1, "shared_memory": "/dev/shm/..." or null, "room": 123456789, "why_not": "..." or null}}
    {"persisted": {"slot": "rank0-0", "sequence": 7}}         on the disk; the slot may be written again
    {"refused": {"slot": "rank0-0", "sequence": 7, "reason": "..."}}     not on the disk; it may be written again
    {"save": {"reason": "notice", "deadline": 1764500000.0 or null}}     please save soon
    {"stop": {"deadline": 1764500000.0}}                      please save and leave

Keys that one side does not know it ignores. Whoever talks nonsense is not listened to any more. The other end is
:mod:`runner.training.channel`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
LONGEST_PATH = 107  # bytes that the kernel has for the address of a socket
LONGEST_LINE = 1 << 16
MOST_UNREAD = 1 << 18  # bytes that wait for a peer before it counts as gone
MOST_PEERS = 4096
MOST_RANKS = 1 << 16
MOST_METRICS = 1000
_STOP_WITHIN_S = 2.0


class NonsenseError(Exception):
    """A peer's line is not what the protocol knows; the message says how."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first words: ``threads`` and ``cpu`` are what its bits depend on, where it tells."""

    rank: int
    world: int
    pid: int
    threads: int | None = None
    cpu: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A rank has reached ``step``."""

    step: int
    total: int | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot is READY. ``stall`` in seconds."""

    slot: str
    sequence: int
    step: int
    stall: float | None
    metrics: tuple[tuple[str, float], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A direct save is complete at ``path``; the trainer stood still for ``seconds``."""

    path: str
    step: int
    seconds: float | None
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest of the state, as ``kind`` says."""

    step: int
    value: str
    kind: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that a person should read."""

    text: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank's connection has ended."""


Message = Hello | Progress | Snapshot | Saved | Digest | Remark | Gone


# -- what a line says --------------------------------------------------------------------------------------------------


def parse(line: bytes) -> Message | None:
    """A peer's line; None for a kind that a younger trainer may know. Raises NonsenseError."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        raise NonsenseError("a line that is no JSON") from None
    if not isinstance(told, dict) or len(told) != 1:
        raise NonsenseError("a line that is no object with one key")
    ((kind, body),) = told.items()
    if kind not in _PARSERS:
        return None
    if not isinstance(body, dict):
        raise NonsenseError(f"a {kind} that is no object")
    return _PARSERS[kind](body)


def _hello(body: dict[str, Any]) -> Hello:
    if body.get("version") != VERSION:
        raise NonsenseError("another version of the protocol")
    world, rank = _count(body, "world"), _count(body, "rank")
    if not rank < world <= MOST_RANKS:
        raise NonsenseError(f"to be rank {rank} of {world}")
    return Hello(rank, world, _count(body, "pid"), _maybe_count(body, "threads"), _maybe_text(body, "cpu"))


def _progress(body: dict[str, Any]) -> Progress:
    return Progress(_count(body, "step"), _maybe_count(body, "total"), _maybe_number(body, "loss"))


def _snapshot(body: dict[str, Any]) -> Snapshot:
    slot = _text(body, "slot")
    if not re.fullmatch(r"rank\d{1,6}-\d{1,2}", slot):
        raise NonsenseError("a slot that has no such name")
    return Snapshot(
        slot,
        _count(body, "sequence"),
        _count(body, "step"),
        _maybe_number(body, "stall"),
        _metrics(body),
        _maybe_text(body, "reason") or "",
    )


def _saved(body: dict[str, Any]) -> Saved:
    return Saved(_text(body, "path"), _count(body, "step"), _maybe_number(body, "seconds"), _metrics(body))


def _digest(body: dict[str, Any]) -> Digest:
    return Digest(_count(body, "step"), _text(body, "value"), _text(body, "kind"))


def _remark(body: dict[str, Any]) -> Remark:
    return Remark(_text(body, "text"))


_PARSERS: dict[str, Callable[[dict[str, Any]], Message]] = {
    "hello": _hello,
    "progress": _progress,
    "snapshot": _snapshot,
    "saved": _saved,
    "digest": _digest,
    "remark": _remark,
}


def _count(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise NonsenseError(f"a {key} that is no count")
    return value


def _maybe_count(body: dict[str, Any], key: str) -> int | None:
    return None if body.get(key) is None else _count(body, key)


def _maybe_number(body: dict[str, Any], key: str) -> float | None:
    """A loss may be infinite or no number at all: then nothing is known."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NonsenseError(f"a {key} that is no number")
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise NonsenseError(f"a {key} that is no text")
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+", " ", value)


def _maybe_text(body: dict[str, Any], key: str) -> str | None:
    return None if body.get(key) is None else _text(body, key)


def _metrics(body: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    told = body.get("metrics") or {}
    if not isinstance(told, dict) or len(told) > MOST_METRICS:
        raise NonsenseError("metrics that are no small object")
    named = [(name, _maybe_number(told, name)) for name in sorted(told)]
    return tuple((name, value) for name, value in named if value is not None)


# -- the socket --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    rank: int | None = None
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Line:
    data: bytes
    rank: int | None


class Channel:
    """Listens from ``open`` to ``close``. ``hear(rank, message)`` is called in the channel's thread: it must not wait.

    ``welcome`` answers a hello; ``complain`` is told of peers that are cut off.
    """

    def __init__(
        self,
        hear: Callable[[int, Message], None],
        welcome: Callable[[], dict[str, Any]],
        complain: Callable[[str], None],
    ) -> None:
        self._hear = hear
        self._welcome = welcome
        self._complain = complain
        self._listener: socket.socket | None = None
        self._private: Path | None = None
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._orders: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)

    def open(self, path: Path) -> Path:
        """Listen at ``path``; where that is too long for an address, in a private temporary folder. Raises OSError."""
        if len(os.fsencode(path)) > LONGEST_PATH:
            self._private = Path(tempfile.mkdtemp(prefix="cloudrun-"))
            path = self._private / "socket"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Before it has a name: nobody else may ever connect.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        listener.listen(128)
        for end in (listener, self._woken, self._waker):
            end.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()
        return path

    def tell(self, kind: str, body: dict[str, Any], rank: int | None = None) -> None:
        """Send a line to a rank, or to all of them. May be called from any thread; returns at once."""
        self._order(_Line(json.dumps({kind: body}).encode() + b"\n", rank))

    def close(self) -> None:
        """What was received is heard; what was told is sent, as far as the peers take it. Then it is over."""
        if self._listener is not None:
            self._order(None)
            self._thread.join(_STOP_WITHIN_S)
            with suppress(OSError):
                os.unlink(self._listener.getsockname())
            self._listener.close()
            self._listener = None
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    def _order(self, line: _Line | None) -> None:
        self._orders.put(line)
        with suppress(OSError):  # full: it is awake already; closed: nobody is there
            self._waker.send(b"\0")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._turn(None):
                pass
            give_up = time.monotonic() + _STOP_WITHIN_S / 2
            # What lies in the sockets by now was said in time.
            while self._selector.select(0.0) and time.monotonic() < give_up:
                self._turn(0.0)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a notice
            self._complain(f"the trainer is not listened to any more: {error!r}")
        finally:
            self._selector.close()
            for end in (self._woken, self._waker, *self._peers):
                end.close()

    def _turn(self, timeout: float | None) -> bool:
        """Do what is ready; False when it is time to end."""
        going_on = True
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                going_on = self._obey()
            elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                if events & selectors.EVENT_READ:
                    self._read(peer)
                if events & selectors.EVENT_WRITE and peer.connection in self._peers:
                    self._write(peer)
        return going_on

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone already; or there are no descriptors left, and it goes on knocking
            time.sleep(0.05)
            return
        if len(self._peers) >= MOST_PEERS:
            connection.close()
            return
        connection.setblocking(False)
        self._peers[connection] = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _obey(self) -> bool:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        with suppress(queue.Empty):
            while (order := self._orders.get_nowait()) is not None:
                for peer in list(self._peers.values()):
                    if peer.rank is not None and order.rank in (None, peer.rank):
                        self._send(peer, order.data)
            return False
        return True

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.unread += data
        *lines, rest = peer.unread.split(b"\n")
        peer.unread = rest
        try:
            for line in lines:
                self._take(peer, bytes(line))
            if len(rest) > LONGEST_LINE:
                raise NonsenseError("a line that does not end")  # noqa: TRY301 - cut off like the others
        except NonsenseError as nonsense:
            who = "somebody" if peer.rank is None else f"rank {peer.rank}"
            self._complain(f"{who} said {nonsense} on the trainer's socket, and is not listened to any more")
            data = b""
        if not data:
            self._drop(peer)

    def _take(self, peer: _Peer, line: bytes) -> None:
        message = parse(line)
        if isinstance(message, Hello):
            if peer.rank is not None:
                raise NonsenseError("hello twice")
            peer.rank = message.rank
            self._send(peer, json.dumps({"welcome": {"version": VERSION, **self._welcome()}}).encode() + b"\n")
        elif peer.rank is None:
            raise NonsenseError("something before hello")
        if message is not None and peer.rank is not None:
            self._hear(peer.rank, message)

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.unsent += data
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            del peer.unsent[: peer.connection.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        if len(peer.unsent) > MOST_UNREAD:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, wanted)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.connection, None) is None:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            self._hear(peer.rank, Gone())
