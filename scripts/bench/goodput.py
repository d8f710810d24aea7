"""What is kept of the paid time when a training job runs on recorded spot machines: cloudrun and simpler ways.

    python -m scripts.bench.goodput TRACES [--json] [--plot FILE.svg] [--upload 10] [--stall 0.5] ...

TRACES is a trace file, or a folder of them: JSON with metadata.gap_seconds and data, the number of machines that were
there in each gap. A job trains while as many are there as ever are. Nothing is timed: the product's own rules run in
simulated time, with a simulated trainer and store.

50 min, 10 min, epoch   a script that saves after so much training and stands still meanwhile; stored when it is saved
script                  cloudrun, with a script that saves when it gets a signal, and stands still meanwhile
library                 cloudrun, with a script that uses runner.training
perfect                 saves cost nothing, and every step is stored at once: only the restarts are lost

What cloudrun saves is kept when it is uploaded. It begins each trace knowing nothing, and learns as it goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path

from scripts.bench.chart import chart
from scripts.bench.replay import LIBRARY, SCRIPT, WAYS, Score, Timing, Trace, read_trace, scores

HELP = {
    "restart": "from the machine's first second to the first step",
    "save": "a blocking save",
    "stall": "what runner.training blocks for a save",
    "persist": "from then until that save is complete on the disk",
    "upload": "of a checkpoint to the store",
    "step": "a step of training",
    "notice": "warning before a machine goes; 0: none",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One trace, and how each way of saving does on it."""

    trace: Trace
    scores: tuple[Score, ...]

    @property
    def kept(self) -> dict[str, float]:
        return {score.way: score.kept for score in self.scores}


def main() -> None:
    options = arguments().parse_args()
    timing = Timing(**{field.name: getattr(options, field.name) for field in fields(Timing)})
    try:
        results = tuple(replayed(options.traces, options.match, timing, options.epoch))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: {options.traces} holds something that is no trace: {error}\nhint: see --help")
    if not results:
        sys.exit(f"error: no trace with a machine in it below {options.traces}\nhint: name a folder with JSON files")
    print(as_json(results) if options.json else table(results, timing))
    if options.plot:
        options.plot.write_text(picture(results, timing))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="a trace, or a folder of traces")
    parser.add_argument("--match", default="*", help="only traces whose path is like this, such as '*v100*'")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a chart, as SVG")
    parser.add_argument("--epoch", type=float, default=1800.0, help="an epoch of training (default: 1800)")
    for field in fields(Timing):
        words = f"seconds: {HELP[field.name]} (default: {field.default:g})"
        parser.add_argument(f"--{field.name}", type=float, default=field.default, help=words)
    return parser


def replayed(path: Path, match: str, timing: Timing, epoch: float) -> Iterator[Result]:
    """Every trace below a path, or the one at it; traces without a machine are left out."""
    root = path if path.is_dir() else path.parent
    for one in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        name = one.relative_to(root).with_suffix("").as_posix()
        if fnmatch(name, match) and (trace := read_trace(one, name)).lives:
            yield Result(trace, tuple(scores(trace, timing, epoch)))


# -- told --------------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result], timing: Timing) -> str:
    """Shares of the paid time, best first where it matters: in the last columns."""
    width = max(len(result.trace.name) for result in results)
    head = f"{'trace':<{width}} {'lives':>6} {'mean':>7}" + "".join(f"{way:>9}" for way in WAYS)
    rows = [head]
    for result in results:
        trace = result.trace
        mean = f"{statistics.mean(trace.lives) / 3600:.2f} h"
        shares = "".join(f"{result.kept[way]:>9.1%}" for way in WAYS)
        rows.append(f"{trace.name:<{width}} {len(trace.lives):>6} {mean:>7}{shares}")
    rows += ["", f"seconds: {figures(timing)}", "", *(spent(results, way) for way in (SCRIPT, LIBRARY))]
    return "\n".join(rows)


def figures(timing: Timing) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(timing).items() if value or name != "notice")


def spent(results: Sequence[Result], way: str) -> str:
    """Where the paid time of all traces together went."""
    paid = sum(result.trace.paid for result in results)

    found = [(result.trace.paid, score) for result in results for score in result.scores if score.way == way]
    kept = sum(seconds * score.kept for seconds, score in found) / paid
    stalled = sum(seconds * (score.stalled or 0.0) for seconds, score in found) / paid
    restarted = sum(seconds * (score.restarted or 0.0) for seconds, score in found) / paid
    lost = 1.0 - kept - stalled - restarted
    return f"{way}: {kept:.1%} kept, {stalled:.1%} saving, {restarted:.1%} starting, {lost:.1%} not stored in time"


def as_json(results: Sequence[Result]) -> str:
    lines = [
        {"trace": result.trace.name, "lives": len(result.trace.lives), "paid_s": result.trace.paid}
        | {"ways": [asdict(score) for score in result.scores]}
        for result in results
    ]
    return json.dumps(lines, indent=2)


def picture(results: Sequence[Result], timing: Timing) -> str:
    rows: list[tuple[str, Mapping[str, float]]] = [(result.trace.name, result.kept) for result in results]
    return chart(rows, "Share of the paid time that is kept, on recorded spot machines", f"Seconds: {figures(timing)}.")


if __name__ == "__main__":
    main()
