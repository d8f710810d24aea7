"""The child: spawn, signal, wait, reap. However a trainer ends, nothing of it is left behind.

Between us and the trainer stands a small process of ours, :mod:`runner.supervisor.guard`: it gathers daemons that
the trainer forks, and kills everything when we are killed. Should the guard itself be killed, we do its work.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from runner.supervisor import guard

START_WITHIN_S = 60.0  # a cold disk may take long to load an interpreter
SWEEP_WITHIN_S = guard.GRACE_S + guard.KILL_LIMIT_S + 3.0  # the guard's own limits, and some air
_TICK_S = 0.5
_FOREVER = float("inf")

Target = Literal["ranks", "group"]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a trainer ended.

    returncode     of its first process; negative: ended by that signal; None: it never started
    spawn_error    why it never started; empty when it did
    stuck          processes that not even SIGKILL ended in time (they wait for a device)
    """

    returncode: int | None
    spawn_error: str = ""
    stuck: tuple[int, ...] = ()


class Trainer:
    """One life of the trainer. ``signal`` and ``kill`` may be called from any thread, ``wait`` from one at a time."""

    def __init__(self, *, start_within: float = START_WITHIN_S, sweep_within: float = SWEEP_WITHIN_S) -> None:
        self._start_within = start_within
        self._sweep_within = sweep_within
        self._guard: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._sending = threading.Lock()
        self._unread = b""
        self._pid = 0
        self._returncode: int | None = None
        self._due = _FOREVER
        self._exit: Exit | None = None

    @property
    def pid(self) -> int:
        """The trainer's first process; 0 when it did not start."""
        return self._pid

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, output_fd: int) -> None:
        """Start the trainer; its stdout and stderr go to ``output_fd``, which stays the caller's to close.

        Returns when the program has been loaded. Never raises for a command that cannot run: :meth:`wait` tells.
        """
        guard.become_subreaper()
        order = {"start": {"argv": list(argv), "env": dict(env), "cwd": cwd}}
        try:
            self._open_guard(output_fd)
            self._send(order, within=self._start_within)
            self._await_start()
        except OSError as error:
            self._fail(f"cannot start a process: {error.strerror or error}")

    def signal(self, number: int, to: Target = "ranks") -> bool:
        """Send a signal to the processes that train, or to everything. False when there is nobody to tell."""
        return self._order({"signal": int(number), "to": to})

    def handles(self, number: int) -> bool:
        """Whether every process that trains has a handler for a signal: any other would die of it."""
        return all(guard.handles(pid, number) for pid in guard.ranks(self._pid, guard.processes()))

    def kill(self) -> None:
        """SIGKILL to everything; :meth:`wait` then returns within ``sweep_within`` seconds, whatever happens."""
        self._due = min(self._due, time.monotonic() + self._sweep_within)
        self._order({"kill": True})

    def wait(self, timeout: float = _FOREVER) -> Exit:
        """Return when the trainer and all that it started have gone. Raises TimeoutError after ``timeout`` seconds."""
        give_up = time.monotonic() + timeout
        while self._exit is None:
            now = time.monotonic()
            if now >= self._due:
                self._do_without_guard()
            elif now >= give_up:
                raise TimeoutError(f"the trainer still runs after {timeout:g} s")
            else:
                # A tick, since kill() in another thread brings the due time forward.
                self._take_event(min(give_up, self._due, now + _TICK_S) - now)
        return self._exit

    # --- starting ---

    def _open_guard(self, output_fd: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = ours
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def _await_start(self) -> None:
        give_up = time.monotonic() + self._start_within
        while not self._pid and self._exit is None:
            left = give_up - time.monotonic()
            if left <= 0:
                self._fail(f"the command did not start within {self._start_within:g} s")
                return
            self._take_event(left)

    def _fail(self, why: str) -> None:
        self._finish(Exit(returncode=None, spawn_error=why))
        if self._guard:
            sweep_descendants()

    # --- the channel ---

    def _order(self, command: dict[str, Any]) -> bool:
        try:
            self._send(command, within=1.0)
        except OSError:
            return False
        return True

    def _send(self, command: dict[str, Any], within: float) -> None:
        data = json.dumps(command).encode() + b"\n"
        give_up = time.monotonic() + within
        with self._sending:
            while data:
                if self._channel is None:
                    raise BrokenPipeError
                self._ready(select.POLLOUT, give_up - time.monotonic())
                data = data[self._channel.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]

    def _ready(self, what: int, within: float) -> None:
        """Wait until the channel can be read or written; raises TimeoutError."""
        assert self._channel is not None
        poll = select.poll()
        poll.register(self._channel, what)
        if not poll.poll(max(0.0, within) * 1000):
            raise TimeoutError("the guard process does not answer")

    def _take_event(self, within: float) -> None:
        """Wait for the guard's next words and act on them."""
        assert self._channel is not None
        try:
            self._ready(select.POLLIN, within)
            data = self._channel.recv(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._do_without_guard()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._note(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if "started" in event:
            self._pid = event["started"]
        elif "failed" in event:
            self._finish(Exit(returncode=None, spawn_error=event["failed"]))
        elif "exited" in event:
            self._returncode = event["exited"]
            self._due = min(self._due, time.monotonic() + self._sweep_within)
        elif "stuck" in event:
            self._finish(Exit(self._ended_by(), stuck=tuple(event["stuck"])))

    def _ended_by(self) -> int:
        return -signal.SIGKILL if self._returncode is None else self._returncode

    # --- ending ---

    def _finish(self, how: Exit) -> None:
        self._close_guard()
        self._exit = how

    def _do_without_guard(self) -> None:
        """The guard has gone, or does not answer: end what it kept, and say how the trainer ended."""
        if self._exit is not None:
            return
        self._close_guard()
        stuck = sweep_descendants()
        if self._pid:
            self._exit = Exit(self._ended_by(), stuck=stuck)
        else:
            self._exit = Exit(returncode=None, spawn_error="the guard process ended before it started the command")

    def _close_guard(self) -> None:
        """Close the channel; a guard that is still there after a moment is killed."""
        with self._sending:
            if self._channel:
                self._channel.close()
                self._channel = None
        if self._guard is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout=1.0)
        self._guard.kill()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout=5.0)


def sweep_descendants(within: float = guard.KILL_LIMIT_S) -> tuple[int, ...]:
    """SIGKILL everything below this process until nothing is left; answers with what did not die in time.

    For the case that a guard was killed: its orphans have come to us, and nothing tells them from other children.
    Killed processes are not reaped here: see :class:`OrphanReaper`.
    """
    give_up = time.monotonic() + within
    quiet = 0
    while quiet < 2:  # one look at /proc can miss a process that is being born
        alive = guard.kill_below(os.getpid())
        if alive and time.monotonic() > give_up:
            return tuple(alive)
        quiet = 0 if alive else quiet + 1
        time.sleep(guard.HUNT_PAUSE_S)
    return ()


class OrphanReaper:
    """Reaps orphans that reach this process: as PID 1 of a container, or as a subreaper.

    Only zombies that have waited for ``patience`` seconds are reaped: those of our own children are taken at once by
    the thread that started them, and their exit status must not be stolen from it.
    """

    def __init__(self, patience: float = 10.0) -> None:
        self._patience = patience
        self._waiting_since: dict[int, float] = {}

    def reap(self, now: float) -> tuple[int, ...]:
        """Reap what is due; call it every few seconds. Answers with the processes that were reaped."""
        children = {pid: child for pid, child in guard.processes().items() if child.parent == os.getpid()}
        zombies = [pid for pid, child in children.items() if child.state == "Z"]
        self._waiting_since = {pid: self._waiting_since.get(pid, now) for pid in zombies}
        due = [pid for pid, since in self._waiting_since.items() if now - since >= self._patience]
        return tuple(pid for pid in due if _reap(pid))


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
