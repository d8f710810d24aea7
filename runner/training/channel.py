"""The supervisor, as the training script sees it: a socket that it may talk on. Without one everything works as well.

Lines of JSON go both ways, each an object with one key; unknown keys are ignored. No call here waits longer than its
limit, and none fails: when the supervisor does not answer, it counts as gone, and that is said once on stderr.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

VARIABLE = "CLOUDRUN_SOCKET"
VERSION = 1
HELLO_WITHIN_S = 10.0
SEND_WITHIN_S = 2.0
PROGRESS_EVERY_S = 1.0  # the supervisor needs no more
LONGEST_REMARK = 10_000  # characters


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the supervisor offers: a folder in shared memory, and bytes there for all ranks together.

    ``shared_memory`` is empty where there is none, ``why_not`` then says why.
    """

    shared_memory: str
    room: int
    why_not: str


class Channel:
    """One rank's connection. Its methods may be called from any thread."""

    def __init__(self, connection: socket.socket, welcome: Welcome, unread: bytes) -> None:
        self.welcome = welcome
        self._connection = connection
        self._sending = threading.Lock()
        self._alive = True
        self._asked = self._urgent = self._stop = False
        self._answered: Callable[[str, int], None] | None = None
        threading.Thread(target=self._listen, args=(unread,), name="cloudrun channel", daemon=True).start()

    @classmethod
    def connect(cls, rank: int, world: int, path: str | None = None) -> Channel | None:
        """Say hello to the supervisor; None when there is none, or it does not answer (which is said on stderr)."""
        path = os.environ.get(VARIABLE, "") if path is None else path
        if not path:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            welcome, unread = _greet(connection, path, rank, world)
        except (OSError, ValueError, TypeError, KeyError) as error:
            connection.close()
            complain(f"the supervisor does not answer ({error}): checkpoints are written directly")
            return None
        return cls(connection, welcome, unread)

    # -- what the supervisor has said ----------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True while the supervisor listens."""
        return self._alive

    @property
    def asked(self) -> bool:
        """True from the supervisor's request for a save until :meth:`save_made`."""
        return self._asked

    @property
    def urgent(self) -> bool:
        """True while a save is asked for that must be stored by a certain time."""
        return self._urgent

    @property
    def stop(self) -> bool:
        """True from the supervisor's request on that the training end."""
        return self._stop

    def save_made(self) -> None:
        """What was asked for has been done."""
        self._asked = self._urgent = False

    def on_answer(self, answered: Callable[[str, int], None]) -> None:
        """``answered(slot, sequence)`` will be called in the channel's thread: the slot may be written again."""
        self._answered = answered

    # -- what this rank says -------------------------------------------------------------------------------------------

    def progress(self, step: int, total: int | None, loss: float | None) -> None:
        """Not more often than each ``PROGRESS_EVERY_S``."""
        self._say("progress", {"step": step, "total": total, "loss": loss})

    def snapshot(self, slot: str, sequence: int, step: int, stall: float, reason: str) -> bool:
        """A slot is READY; for ``stall`` seconds the training stood still for it. False when nobody listens."""
        told = {"slot": slot, "sequence": sequence, "step": step, "stall": stall, "metrics": {}, "reason": reason}
        return self._say("snapshot", told)

    def saved(self, path: str, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """A direct save is complete at ``path``, or under this name in the checkpoint folder."""
        self._say("saved", {"path": path, "step": step, "seconds": seconds, "metrics": metrics})

    def digest(self, step: int, value: str, kind: str) -> None:
        self._say("digest", {"step": step, "value": value, "kind": kind})

    def remark(self, text: str) -> None:
        """Something that a person should read in the job's record."""
        self._say("remark", {"text": text[:LONGEST_REMARK]})

    def close(self) -> None:
        self._alive = False
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _say(self, kind: str, body: dict[str, Any]) -> bool:
        data = json.dumps({kind: body}).encode() + b"\n"
        with self._sending:
            if not self._alive:
                return False
            try:
                self._connection.sendall(data)
            except OSError as error:
                self._lose(error)
        return self._alive

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _listen(self, unread: bytes) -> None:
        try:
            while self._alive:
                *lines, unread = unread.split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                with suppress(TimeoutError):  # it limits how long a line may take to be sent
                    unread += _receive(self._connection)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._lose(error)

    def _take(self, told: dict[str, Any]) -> None:
        if "save" in told:
            self._asked = True
            self._urgent = self._urgent or told["save"].get("deadline") is not None
        self._stop = self._stop or "stop" in told
        answer = told.get("persisted") or told.get("refused")
        if answer and self._answered is not None:
            self._answered(answer["slot"], answer["sequence"])

    def _lose(self, error: Exception) -> None:
        if self._alive:
            self._alive = False
            complain(f"the supervisor does not listen any more ({error})")


def complain(text: str) -> None:
    """For the person who reads the output."""
    sys.stderr.write(f"cloudrun: {text}\n")
    sys.stderr.flush()


def _greet(connection: socket.socket, path: str, rank: int, world: int) -> tuple[Welcome, bytes]:
    connection.settimeout(HELLO_WITHIN_S)
    connection.connect(path)
    hello = {"version": VERSION, "rank": rank, "world": world, "pid": os.getpid()}
    bits = {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    connection.sendall(json.dumps({"hello": hello | bits}).encode() + b"\n")
    unread, give_up = b"", time.monotonic() + HELLO_WITHIN_S
    while b"\n" not in unread:
        connection.settimeout(max(0.001, give_up - time.monotonic()))
        unread += _receive(connection)
    line, _, rest = unread.partition(b"\n")
    body = json.loads(line)["welcome"]
    connection.settimeout(SEND_WITHIN_S)
    return Welcome(str(body["shared_memory"] or ""), int(body["room"]), str(body["why_not"] or "")), rest


def _receive(connection: socket.socket) -> bytes:
    """At least one byte. Raises TimeoutError, and ConnectionError at the end."""
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionError("the connection has ended")
    return data
