"""The replay of spot traces counts what it says, and the product does on it what the formula promises."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from scripts.bench.chart import MARKS, chart
from scripts.bench.replay import (
    LIBRARY,
    PERFECT,
    SCRIPT,
    WAYS,
    Timing,
    Trace,
    kept_by_schedule,
    kept_perfectly,
    product,
    read_trace,
    scores,
    unmodified,
    with_library,
)

ROOT = Path(__file__).resolve().parents[2]
TIMING = Timing()


def memoryless(mean: float, count: int = 200) -> Trace:
    """Lives of machines that are as likely to go at any moment: quantiles, short and long ones mixed."""
    lives = [-mean * math.log(1.0 - (number + 0.5) / count) for number in range(count)]
    return Trace("memoryless", tuple(lives[number * 83 % count] for number in range(count)))


def kept(trace: Trace, timing: Timing = TIMING) -> dict[str, float]:
    return {score.way: score.kept for score in scores(trace, timing, 1800.0)}


def write_trace(path: Path, counts: list[int], gap: float = 600.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": counts}))
    return path


@pytest.mark.parametrize(
    ("counts", "lives"),
    [
        ([0, 1, 1, 0, 0, 1, 0], (1200.0, 600.0)),
        ([4, 4, 3, 4, 0, 2], (1200.0, 600.0)),
        ([1, 1], (1200.0,)),
        ([0, 0], ()),
    ],
    ids=["one machine", "four of them train together", "never taken", "never there"],
)
def test_lives_are_what_the_trace_holds(tmp_path: Path, counts: list[int], lives: tuple[float, ...]) -> None:
    assert read_trace(write_trace(tmp_path / "t.json", counts), "t").lives == lives


def test_a_schedule_keeps_whole_intervals_only() -> None:
    trace = Trace("t", (30.0 + 3 * 620.0 + 619.0, 20.0))
    assert kept_by_schedule(trace, TIMING, 600.0) == 1800.0
    assert kept_perfectly(trace, TIMING) == 3 * 620.0 + 619.0


@pytest.mark.parametrize("mean", [2700.0, 7200.0, 30_000.0])
def test_the_product_is_within_a_point_of_the_formula(mean: float) -> None:
    """Waste is c/T + (T/2 + lag + restart) / mean life, with the best T."""
    trace = memoryless(mean)
    every = math.sqrt(2.0 * TIMING.stall * mean)
    lag = TIMING.persist + TIMING.upload
    waste = TIMING.stall / every + (every / 2.0 + lag + TIMING.restart) / mean
    assert kept(trace)[LIBRARY] == pytest.approx(1.0 - waste, abs=0.01)


@pytest.mark.parametrize("mean", [2700.0, 7200.0, 30_000.0])
def test_no_schedule_is_better_than_the_product_and_nothing_than_perfection(mean: float) -> None:
    found = kept(memoryless(mean))
    assert tuple(found) == WAYS
    fixed = max(found[way] for way in ("50 min", "10 min", "epoch"))
    assert fixed < found[LIBRARY] < found[PERFECT] < 1.0
    assert fixed - 0.005 < found[SCRIPT] < found[LIBRARY]


def test_a_machine_that_is_not_taken_is_saved_on_rarely() -> None:
    score = product(SCRIPT, Trace("t", (500_000.0,)), TIMING, unmodified(TIMING))
    assert score.kept > 0.97
    assert score.saves is not None
    assert score.saves < 2.0 * 500_000.0 / 900.0


def test_a_notice_saves_what_came_since_the_last_save() -> None:
    trace = memoryless(5400.0, 60)
    untold, told = (
        product(LIBRARY, trace, Timing(notice=notice), with_library(TIMING)).kept for notice in (0.0, 120.0)
    )
    assert told > untold - 0.03, "the rest of the notice is not trained any more"
    told_late = product(LIBRARY, trace, Timing(notice=30.0), with_library(TIMING)).kept
    assert told_late > untold


def test_equal_questions_get_equal_answers() -> None:
    trace = memoryless(4000.0, 20)
    assert list(scores(trace, TIMING, 1800.0)) == list(scores(trace, TIMING, 1800.0))


# -- the command -------------------------------------------------------------------------------------------------------


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.bench.goodput", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def test_the_command_tells_a_folder_of_traces(tmp_path: Path) -> None:
    write_trace(tmp_path / "aws" / "a_v100.json", [0] + [1] * 20 + [0] + [1] * 5)
    write_trace(tmp_path / "aws" / "b_k80.json", [1] * 9)
    write_trace(tmp_path / "gcp" / "never.json", [0, 0])
    picture = tmp_path / "out.svg"
    done = bench(str(tmp_path), "--plot", str(picture), "--upload", "5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["aws/a_v100", "aws/b_k80"]
    assert lines[1].split()[1:4] == ["2", "2.08", "h"]
    assert "upload 5" in lines[4]
    assert "notice" not in lines[4]
    ET.parse(picture)
    assert "aws/a_v100" in picture.read_text()


def test_the_command_speaks_json(tmp_path: Path) -> None:
    write_trace(tmp_path / "a_v100.json", [1] * 20)
    write_trace(tmp_path / "b_k80.json", [1] * 20)
    told = json.loads(bench(str(tmp_path), "--match", "*v100*", "--json").stdout)
    assert [(one["trace"], one["lives"], one["paid_s"]) for one in told] == [("a_v100", 1, 12_000.0)]
    assert [score["way"] for score in told[0]["ways"]] == list(WAYS)


@pytest.mark.parametrize("content", ["not json", "{}", '{"metadata": {"gap_seconds": "x"}, "data": [1]}'])
def test_what_is_no_trace_is_told_in_two_lines(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    done = bench(str(tmp_path))
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_the_chart_has_a_mark_for_each_way_and_its_legend() -> None:
    shares = dict(zip(WAYS, (0.55, 0.8, 0.7, 0.9, 0.97, 0.99), strict=True))
    page = chart([("a <b>", shares), ("c", shares)], "title", "note")
    root = ET.fromstring(page)
    assert len(root.findall("{*}path")) == 3 * 2, "two ways of cloudrun, in the legend and twice below"
    assert set(MARKS) == set(WAYS)
    assert "a &lt;b&gt;" in page
    assert ">50%<" in page
    assert ">100%<" in page
