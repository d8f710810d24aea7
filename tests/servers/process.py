"""A server as a child process: free ports, readiness, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

READY_WITHIN = 60.0
"""Seconds; a loaded machine is slow."""

_PORTS = range(10_000, 32_000)
"""Below the kernel's ephemeral ports, so that nobody's outgoing connection takes one that was found free."""


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports of 127.0.0.1 that nobody listens on."""
    found: set[int] = set()
    while len(found) < count:
        port = random.choice(_PORTS)
        if _is_free(port):
            found.add(port)
    return tuple(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def program(name: str) -> str:
    """A program of the environment that runs the tests, whether its folder is in PATH or not."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: pip install -e '.[dev]'")
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of the server's own, short enough for the socket paths in it; removed at the end."""
    folder = tempfile.mkdtemp(prefix="cloudrun-test-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(
    command: Sequence[str], folder: Path, is_ready: Callable[[], bool], environ: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run ``command`` in ``folder`` while the block lasts, once ``is_ready``. It dies with us, however we end."""
    output = folder / "server.log"
    with output.open("wb") as log:
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_ready(child, is_ready, output)
        yield
    finally:
        _stop(child)


def _await_ready(child: subprocess.Popen[bytes], is_ready: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while not is_ready():
        if child.poll() is not None or time.monotonic() > deadline:
            how = f"left with {child.returncode}" if child.returncode is not None else "does not answer"
            raise RuntimeError(f"{child.args!r} {how}:\n{output.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the whole process group. Its data is thrown away, so that it needs no time to settle."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
