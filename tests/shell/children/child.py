"""Trainers of every character, for tests: ``child.py MODE FOLDER [ARGUMENT]``.

FOLDER is where they leave their marks; as a word of their command line it also is how a test finds them.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
ARGUMENT = sys.argv[3] if len(sys.argv) > 3 else ""


def leave(mark: str, text: str = "") -> None:
    part = FOLDER / f".{mark}.{os.getpid()}"
    part.write_text(text or str(os.getpid()))
    part.rename(FOLDER / mark)


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def be_deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def good() -> None:
    print("step 1/2", flush=True)
    print("step 2/2", flush=True)


def crash() -> None:
    raise RuntimeError("a bug in the training script")


def deaf() -> None:
    be_deaf()
    leave("ready")
    sleep_for_ever()


def late() -> None:
    """Saves a second after it was asked to stop."""

    def save(*_: object) -> None:
        time.sleep(1)
        leave("saved")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    leave("ready")
    sleep_for_ever()


def daemonize(name: str) -> bool:
    """Fork twice, leave the session, close every file; True in the daemon."""
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    be_deaf()
    leave(name)
    return True


def daemons() -> None:
    """Deaf, and leaves deaf daemons; ARGUMENT ``exit``: ends by itself."""
    be_deaf()
    for name in ("daemon-1", "daemon-2", "daemon-3"):
        if daemonize(name):
            sleep_for_ever()
    while not all((FOLDER / f"daemon-{n}").exists() for n in (1, 2, 3)):
        time.sleep(0.01)
    leave("ready")
    if ARGUMENT != "exit":
        sleep_for_ever()


def hopper() -> None:
    """A daemon that is never the same process for long."""
    if not daemonize("ready"):
        return
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.002)


def record() -> None:
    """Writes down which signals it gets; ends at SIGTERM. Has a worker that does the same, and ends with it."""
    name = ARGUMENT or "leader"
    parent = os.getpid()

    def note(number: int, _: object) -> None:
        leave(f"{name}.{signal.Signals(number).name}")
        if number == signal.SIGTERM:
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
        signal.signal(number, note)
    if os.fork() == 0:
        name += "-worker"
    leave(f"{name}.ready")
    while os.getpid() == parent or os.getppid() == parent:
        time.sleep(0.02)


def launch() -> None:
    """A launcher with two ranks in sessions of their own. It notes signals itself."""

    def note(number: int, _: object) -> None:
        leave(f"launcher.{signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__).resolve(), "record", FOLDER, f"rank{n}"], start_new_session=True
        )
        for n in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    globals()[MODE]()
