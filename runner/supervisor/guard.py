"""The process between supervisor and trainer: however the supervisor ends, nothing of the trainer stays behind.

Runs as a script, ``python -I -S guard.py FD``, and needs the standard library only, so that it is small and quick
to start. It is the reaper of everything the trainer starts, daemons included (a "child subreaper", prctl(2)):
when it has no child left, nothing of the trainer is left.

It talks with the supervisor over the stream socket FD, one JSON object a line. Down:

    {"start": {"argv": [...], "env": {...}, "cwd": "..."}}      once, first
    {"signal": 15, "to": "ranks"}      the processes that train: see :func:`ranks`
    {"signal": 15, "to": "group"}      everything that descends from the trainer
    {"kill": true}                     SIGKILL to everything, until nothing is left

Up:

    {"started": pid} or {"failed": "why"}
    {"exited": code}                   the trainer's first process has ended; negative: by that signal
    {"stuck": [pids]}                  the last line: nothing is left but these, which do not even die of SIGKILL

End of file means that the supervisor is dead: everything is killed at once.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

GRACE_S = 2.0  # between SIGTERM and SIGKILL, for what outlives the trainer's first process
KILL_LIMIT_S = 10.0  # a process that SIGKILL does not end by then waits for a device
HUNT_PAUSE_S = 0.02
LONG_HUNT_PAUSE_S = 1.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Programs that train nothing themselves and have others do it: names of programs and of ``python -m`` modules.
LAUNCHERS = frozenset(
    {
        "torchrun",
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed",
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
        "composer",
        "ft_launcher",
        *("sh", "bash", "dash", "zsh", "ksh", "ash"),
        *("uv", "conda", "timeout", "tini", "dumb-init"),
    }
)
# What else stands below a launcher or a shell. They must outlive the trainer's last words: no signal for them.
ATTENDANTS = frozenset({"tee", "cat", "grep", "sed", "awk", "ts", "tail", "head", "logger", "resource_tracker"})


class Process(NamedTuple):
    """What /proc says of a process; ``state`` is "Z" for one that has ended and was not reaped yet."""

    parent: int
    state: str
    group: int


Processes = dict[int, Process]


def processes() -> Processes:
    """Every process that can be seen, zombies included, by pid."""
    return {int(name): entry for name in os.listdir("/proc") if name.isdigit() and (entry := _look_up(name))}


def _look_up(pid: str) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in parentheses and may hold any byte, parentheses included.
            state, parent, group = file.read().rpartition(b")")[2].split(maxsplit=3)[:3]
    except (OSError, ValueError):
        return None
    return Process(int(parent), state.decode("ascii", "replace"), int(group))


def descendants(root: int, table: Processes) -> list[int]:
    """Everything below ``root``, parents first."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found = children.get(root, [])
    for pid in found:
        found.extend(children.get(pid, ()))  # a list may grow while it is walked
    return found


def send(pids: Sequence[int], number: int) -> None:
    """Send a signal; processes that have gone meanwhile are no error."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def living_below(root: int) -> list[int]:
    table = processes()
    return [pid for pid in descendants(root, table) if table[pid].state != "Z"]


def kill_below(root: int) -> list[int]:
    """SIGKILL everything below ``root`` that can be seen now; answers with what was alive.

    Whole process groups first: that is atomic, so that a daemon which forks faster than we look does not escape.
    Zombies tell of its group. A group cannot hold strangers, since the trainer leads a session of its own.
    """
    table = processes()
    below = descendants(root, table)
    for group in {table[pid].group for pid in below} - {0, 1, os.getpgrp()}:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    send(below, signal.SIGKILL)
    return [pid for pid in below if table[pid].state != "Z"]


def become_subreaper() -> None:
    """From now on orphans below this process become its children, not those of PID 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- who trains ---


def ranks(pid: int, table: Processes) -> list[int]:
    """The processes that train, from ``pid`` down: ``pid`` itself, or what the launchers and shells there have started.

    A launcher that has started nothing yet stands for itself.
    """
    if program(command_line(pid)) not in LAUNCHERS:
        return [pid]
    below = [
        rank
        for child, process in table.items()
        if process.parent == pid and process.state != "Z" and program(command_line(child)) not in ATTENDANTS
        for rank in ranks(child, table)
    ]
    return below or [pid]


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. Python's goes when the interpreter ends, before its last words."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next(line for line in file if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty when it has gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def program(argv: Sequence[str]) -> str:
    """What a command line runs: ``torchrun`` also for ``python /venv/bin/torchrun``, the module for ``python -m``."""
    name = os.path.basename(argv[0]).lstrip("-") if argv else ""
    return _python_program(argv[1:]) if name.startswith("python") else name


def _python_program(arguments: Sequence[str]) -> str:
    words = iter(arguments)
    for word in words:
        if word == "-m":
            return next(words, "")
        if word == "-c":
            return "resource_tracker" if "resource_tracker" in next(words, "") else ""
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            return os.path.basename(word)
    return ""


# --- the trainer's first process ---


def spawn(argv: Sequence[str], env: dict[str, str], cwd: str, kept: frozenset[int]) -> tuple[int, str]:
    """Start the trainer in a session of its own: (pid, "") or (0, why not). Signals in ``kept`` stay as they are."""
    reading, writing = os.pipe()
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, env, cwd, kept, guard, writing)
    os.close(writing)
    # The other end closes by itself when the program has been loaded.
    with os.fdopen(reading, "rb") as pipe:
        why = pipe.read().decode("utf-8", "replace")
    if why:
        os.waitpid(pid, 0)
        return 0, why
    return pid, ""


def _become(
    argv: Sequence[str], env: dict[str, str], cwd: str, kept: frozenset[int], guard: int, complaints: int
) -> NoReturn:
    try:
        os.setsid()
        _die_with(guard)
        _reset_signals(kept)
        _enter(cwd)
        os.execvpe(argv[0], list(argv), env)  # noqa: S606  # running the user's command is what the product does
    except BaseException as error:  # noqa: BLE001  # nothing may leave a forked child but exec, or its complaint
        os.write(complaints, explain(error, argv).encode("utf-8", "replace"))
    os._exit(127)


def _die_with(guard: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != guard:
        os._exit(127)


def _reset_signals(kept: frozenset[int]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - kept:
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _enter(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        raise RuntimeError(f"cannot enter the working directory {cwd}: {error.strerror}") from None


def explain(error: BaseException, argv: Sequence[str]) -> str:
    """Why the command did not start, for a person."""
    if isinstance(error, RuntimeError):
        return str(error)
    if not argv:
        return "the command is empty"
    if not isinstance(error, OSError):
        return f"cannot run {argv[0]}: {error}"
    if error.errno == errno.ENOEXEC:
        return f"cannot run {argv[0]}: neither a program nor a script that begins with #!"
    if error.errno == errno.ENOENT and "/" in argv[0] and os.path.exists(argv[0]):
        return f"cannot run {argv[0]}: the interpreter that its first line names does not exist"
    return f"cannot run {argv[0]}: {error.strerror}"


# --- the loop ---


class Guard:
    """Starts one trainer, passes signals on, and leaves when nothing of the trainer is left."""

    def __init__(self, channel: int, wakeup: int, kept: frozenset[int]) -> None:
        self._channel = channel
        self._wakeup = wakeup
        self._kept = kept
        self._unread = b""
        self._leader = 0
        self._running = False
        self._childless = True
        self._supervised = True
        self._kill_at: float | None = None

    def run(self) -> None:
        """Return when the trainer has gone, or what is left of it does not die."""
        while not self._finished():
            self._listen()
            self._reap()
            self._hunt()
        if self._leader:
            self._tell({"stuck": self._stuck()})

    def _finished(self) -> bool:
        if self._leader and self._childless:
            return True
        if not self._supervised:
            return self._childless
        return self._kill_at is not None and time.monotonic() > self._kill_at + KILL_LIMIT_S

    def _stuck(self) -> list[int]:
        return [] if self._childless else living_below(os.getpid()) or descendants(os.getpid(), processes())

    # --- talking ---

    def _tell(self, event: dict[str, Any]) -> None:
        with suppress(OSError):
            os.write(self._channel, json.dumps(event).encode() + b"\n")

    def _listen(self) -> None:
        """Sleep until there is something to do, and do what the supervisor says."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._supervised:
            poll.register(self._channel, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(self._pause())}
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if self._channel in ready:
            for command in self._commands():
                self._obey(command)

    def _pause(self) -> float | None:
        """Milliseconds until the next blow; None: nothing to do."""
        if self._kill_at is None:
            return None
        due = self._kill_at - time.monotonic()
        if due > 0:
            return due * 1000
        return 1000 * (HUNT_PAUSE_S if due > -GRACE_S else LONG_HUNT_PAUSE_S)

    def _commands(self) -> Iterator[dict[str, Any]]:
        try:
            data = os.read(self._channel, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self._supervised = False
            self._kill_now()
        *lines, self._unread = (self._unread + data).split(b"\n")
        yield from (json.loads(line) for line in lines)

    def _obey(self, command: dict[str, Any]) -> None:
        if "start" in command:
            self._start(**command["start"])
        elif "kill" in command:
            self._kill_now()
        elif self._running:
            table = processes()
            everyone = command["to"] == "group"
            send(descendants(os.getpid(), table) if everyone else ranks(self._leader, table), command["signal"])

    # --- the trainer ---

    def _start(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        pid, why = spawn(argv, env, cwd, self._kept)
        # From here on the pipe's writers are the trainer's own, so that its end is the pipe's end.
        _silence()
        if why:
            self._tell({"failed": why})
            sys.exit(0)
        self._leader, self._running, self._childless = pid, True, False
        self._tell({"started": pid})

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._leader:
                    self._leader_ended(os.waitstatus_to_exitcode(status))
        self._childless = True

    def _leader_ended(self, code: int) -> None:
        self._running = False
        self._tell({"exited": code})
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S
            send(living_below(os.getpid()), signal.SIGTERM)

    def _kill_now(self) -> None:
        now = time.monotonic()
        self._kill_at = now if self._kill_at is None else min(now, self._kill_at)

    def _hunt(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at and not self._childless:
            kill_below(os.getpid())


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)


def _deafen() -> frozenset[int]:
    """Ignore what would end this process; answers with the signals that were ignored already and stay so (nohup)."""
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return frozenset(kept)


def _wake_on_child() -> int:
    """A descriptor that can be read when a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def main() -> None:
    """Guard one trainer; the channel's descriptor is the only argument."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    kept = _deafen()
    become_subreaper()
    Guard(channel, _wake_on_child(), kept).run()


if __name__ == "__main__":
    main()
