"""What a save costs a training: runner.training against torch.save, DCP, torchsnapshot, and one plain memory copy.

    python -m scripts.bench.checkpoint [--layers 21 64] [--rounds 3] [--saves 3] [--quick] [--json]
                                       [--torchsnapshot PYTHON]

The training is an MLP of 2048 x 2048 layers without bias, with Adam: 21 layers are 1 GiB of parameters and state, 64
are 3 GiB. Each way to save runs as a job of its own under `cloudrun submit`, with a folder as its store. Rounds are
interleaved: each way once, then all again. Figures are medians over all rounds; the first save of each job is told
apart ("cold"), since many ways take their memory then.

    stall       seconds inside the save call
    x copy      of the warm stall, over one plain copy of the state into memory that is there, taken right before it
    slow-down   seconds that the steps lost while the save was on its way, one after the other
    durable     seconds from the call until it is complete on the disk
    stored      the same, until it is committed in the store; "-" where cloudrun does not know the format
    memory      peak of the training and all below it, over what it had before it first saved

PYTHON is an interpreter in whose environment torchsnapshot is installed. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINING = Path(__file__).with_name("ways_to_save.py")
WAYS = (
    "runner.training",
    "torch.save",
    "torch.save, fsync",
    "clones, a thread",
    "DCP save",
    "DCP async_save, thread",
    "DCP async_save, process",
)
SNAPSHOT = "torchsnapshot async_take"
LIMIT = 900.0
WIDTH, QUICK_WIDTH = 2048, 64
GIB = 1 << 30


@dataclass(slots=True)
class Figures:
    """All saves of one way at one size: each a dictionary as in :class:`ways_to_save.Seen`."""

    cold: list[Mapping[str, float]] = field(default_factory=list)
    warm: list[Mapping[str, float]] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    state: float = 0.0
    failed: str = ""

    def add(self, output: str) -> None:
        seen = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("seen ")]
        self.cold += seen[:1]
        self.warm += seen[1:]
        for line in output.splitlines():
            if line.startswith("memory "):
                told = json.loads(line[7:])
                self.memory.append(told["extra"])
                self.state = told["state"]

    def of(self, name: str, *, cold: bool = False) -> float | None:
        """The median; None where nothing was seen."""
        values = [one[name] for one in (self.cold if cold else self.warm) if one[name] is not None]
        return statistics.median(values) if values else None

    def copies(self) -> float | None:
        """The warm stall, in plain copies of the state."""
        values = [one["stall"] / one["copy"] for one in self.warm if one["copy"]]
        return statistics.median(values) if values else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table; 1 when a way failed."""
    options = parse(arguments)
    width = QUICK_WIDTH if options.quick else WIDTH
    ways = dict.fromkeys(options.ways, sys.executable)
    if options.torchsnapshot:
        ways[SNAPSHOT] = options.torchsnapshot
    found: dict[int, dict[str, Figures]] = {layers: defaultdict(Figures) for layers in options.layers}
    for number in range(options.rounds):
        for layers in options.layers:
            for way, python in ways.items():
                print(f"round {number + 1}, {layers} layers: {way}", file=sys.stderr)
                run(found[layers][way], [python, str(TRAINING), way, str(layers), str(width), str(options.saves)])
    print(as_json(found) if options.json else "\n".join(table(layers, found[layers]) for layers in options.layers))
    return int(any(figures.failed for of_size in found.values() for figures in of_size.values()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[21, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="in each job; the first is cold")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help="; ".join(WAYS))
    parser.add_argument("--quick", action="store_true", help="tiny layers: to see that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--torchsnapshot", metavar="PYTHON")
    return parser.parse_args(arguments)


def run(figures: Figures, command: list[str]) -> None:
    """One job, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="cloudrun-bench-") as name:
        folder = Path(name)
        store = folder / "store"
        store.mkdir()
        spec = {
            "name": "bench",
            "command": command,
            "store": f"file://{store}",
            "env": {"BENCH_STORE": str(store), "PYTHONPATH": str(ROOT)},
            # After the first one, none is uploaded while the next are measured.
            "checkpoints": {"every": "1h", "keep": {"last": 1}},
            "restart": {"max_without_progress": 1},
        }
        (folder / "job.yaml").write_text(json.dumps(spec))
        environ = os.environ | {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CACHE")}
        submit = [sys.executable, "-m", "runner", "submit", str(folder / "job.yaml")]
        done = subprocess.run(submit, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    figures.add(done.stdout)
    if not figures.memory:
        figures.failed = figures.failed or (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]


def table(layers: int, found: Mapping[str, Figures]) -> str:
    state = max((figures.state for figures in found.values()), default=0)
    copies = [value for figures in found.values() if (value := figures.of("copy")) is not None]
    plain = f"{statistics.median(copies):.3f} s" if copies else "unknown"
    lines = [
        f"\n{layers} layers, {state / GIB:.2f} GiB of state; one plain copy: {plain}\n",
        "| way | stall cold s | stall s | x copy | slow-down s | durable s | stored s | memory GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(way, figures) for way, figures in found.items())])


def row(way: str, figures: Figures) -> str:
    if figures.failed:
        return f"| {way} | failed: {figures.failed} |"
    values = [
        figures.of("stall", cold=True),
        figures.of("stall"),
        figures.copies(),
        figures.of("slowdown"),
        figures.of("durable"),
        figures.of("stored", cold=True),
        statistics.median(figures.memory) / GIB,
    ]
    return f"| {way} | " + " | ".join("-" if value is None else f"{value:.2f}" for value in values) + " |"


def as_json(found: Mapping[int, Mapping[str, Figures]]) -> str:
    rows: list[dict[str, Any]] = [
        {
            "layers": layers,
            "way": way,
            "stall_cold": figures.of("stall", cold=True),
            "stall": figures.of("stall"),
            "copies": figures.copies(),
            "slowdown": figures.of("slowdown"),
            "durable": figures.of("durable"),
            "stored": figures.of("stored", cold=True),
            "memory": statistics.median(figures.memory) if figures.memory else None,
            "failed": figures.failed,
        }
        for layers, of_size in found.items()
        for way, figures in of_size.items()
    ]
    return json.dumps(rows, indent=1)


if __name__ == "__main__":
    sys.exit(main())
