"""What the supervisor costs: CPU and memory at rest, the time of --help, and of starting a killed trainer again.

    scripts/bench/footprint.py [--seconds 60] [--restarts 10]

Prints a table with the targets beside the figures. Runs real jobs in a temporary folder; needs an idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
SCRIPT = """
import os, sys, time
print("started", time.time(), flush=True)
with open(os.environ["DIARY"], "a") as diary:
    diary.write(f"{time.time()} {os.getpid()}\\n")
step = 0
while True:
    time.sleep(1)
    step += 1
    print(f"step {step}/100000 loss 0.1", flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the job rests under observation")
    parser.add_argument("--restarts", type=int, default=10, help="how often the trainer is killed")
    options = parser.parse_args()
    rows = [("cloudrun --help, median of 15", f"{help_time() * 1000:.0f} ms", "under 150 ms")]
    rows.append(("    of which python -c pass", f"{bare_python() * 1000:.0f} ms", ""))
    with running_job() as (supervisor, diary):
        wait_for(lambda: len(lines(diary)) >= 1)
        time.sleep(5.0)
        rows += at_rest(supervisor, options.seconds)
        rows += restarts(diary, options.restarts)
    width = max(len(name) for name, _, _ in rows)
    print(f"{'what':<{width}}  {'seen':>16}  target")
    for name, seen, target in rows:
        print(f"{name:<{width}}  {seen:>16}  {target}")


def help_time() -> float:
    command = [str(Path(sys.executable).parent / "cloudrun"), "--help"]
    return median_time(command, 15)


def bare_python() -> float:
    return median_time([sys.executable, "-c", "pass"], 15)


def median_time(command: list[str], times: int) -> float:
    def once() -> float:
        began = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began

    once()
    return statistics.median(once() for _ in range(times))


@contextmanager
def running_job() -> Iterator[tuple[int, Path]]:
    """A job whose trainer prints a step each second, as a real one does. Yields the supervisor's pid and the diary."""
    with tempfile.TemporaryDirectory(prefix="cloudrun-bench-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "job.yaml").write_text(
            f"name: bench\ncommand: {sys.executable} train.py\nstore: file://{folder}/store\n"
            "restart: {max_without_progress: 1000, backoff: {first: 0s, limit: 0s}}\n"
        )
        homes = {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "DATA", "CACHE")}
        env = {**os.environ, **homes, "DIARY": str(folder / "diary")}
        command = [sys.executable, "-m", "runner", "submit", str(folder / "job.yaml"), "--quiet"]
        with (folder / "out").open("wb") as out:
            supervisor = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            yield supervisor.pid, folder / "diary"
        finally:
            supervisor.send_signal(signal.SIGINT)
            supervisor.wait(60)


def at_rest(supervisor: int, seconds: float) -> list[tuple[str, str, str]]:
    guard = children(supervisor)[0]
    before = {pid: cpu_seconds(pid) for pid in (supervisor, guard)}
    time.sleep(seconds)
    share = {pid: (cpu_seconds(pid) - before[pid]) / seconds for pid in before}
    return [
        (f"supervisor at rest, CPU of one core over {seconds:.0f} s", f"{share[supervisor]:.2%}", "under 1 %"),
        ("    and its guard process", f"{share[guard]:.2%}", ""),
        ("supervisor, resident memory", f"{resident(supervisor) / 2**20:.0f} MiB", "under 80 MiB"),
        ("    and its guard process", f"{resident(guard) / 2**20:.0f} MiB", ""),
    ]


def restarts(diary: Path, times: int) -> list[tuple[str, str, str]]:
    """From kill -9 of the trainer to the first line of the next one, beside the bare start of the same script."""
    waits = []
    for count in range(times):
        time.sleep(1.5)
        _, pid = lines(diary)[-1].split()
        killed = time.time()
        os.kill(int(pid), signal.SIGKILL)
        wait_for(lambda done=count + 2: len(lines(diary)) >= done)  # type: ignore[misc]
        waits.append(float(lines(diary)[-1].split()[0]) - killed)
    bare = statistics.median(bare_start() for _ in range(5))
    middle = statistics.median(waits)
    return [
        (f"trainer killed -> its next first line, median of {times}", f"{middle * 1000:.0f} ms", ""),
        ("    the script's own start", f"{bare * 1000:.0f} ms", ""),
        ("    on top", f"{(middle - bare) * 1000:.0f} ms", "under 1 s"),
        ("    slowest", f"{max(waits) * 1000:.0f} ms", ""),
    ]


def bare_start() -> float:
    began = time.time()
    with tempfile.NamedTemporaryFile() as diary:
        env = {**os.environ, "DIARY": diary.name}
        child = subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.DEVNULL)
        wait_for(lambda: Path(diary.name).read_text())
        first = float(Path(diary.name).read_text().split()[0])
        child.kill()
        child.wait()
    return first - began


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def children(pid: int) -> list[int]:
    """Of all its threads: the kernel lists children by the thread that made them."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            sys.exit("error: the job does not do what it should; run it by hand")
        time.sleep(0.002)


if __name__ == "__main__":
    main()
