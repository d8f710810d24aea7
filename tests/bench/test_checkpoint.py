"""The benchmark of saves runs, on small states, and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.checkpoint import WAYS, Figures, row

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.bench.checkpoint", "--quick", "--layers", "2", "--rounds", "1"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_every_way_saves() -> None:
    done = bench("--json")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(done.stdout)
    assert [one["way"] for one in rows] == list(WAYS)
    assert all(one["failed"] == "" and 0 < one["stall"] < 60 and one["durable"] >= one["stall"] for one in rows)


def test_ours_is_measured_to_the_store() -> None:
    done = bench("--json", "--saves", "2", "--ways", "runner.training")
    assert done.returncode == 0, done.stderr + done.stdout
    (ours,) = json.loads(done.stdout)
    assert 0 < ours["stall"] < ours["durable"]
    assert ours["stored"] > 0
    assert ours["copies"] > 0


def test_a_row_tells_medians_and_what_is_missing() -> None:
    figures = Figures()
    for stall in (0.2, 0.4, 0.3):
        save = {"stall": stall, "copy": 0.1, "slowdown": 0.0, "durable": 2.0, "stored": None}
        figures.add(f"noise\nseen {json.dumps(save)}\nseen {json.dumps(save | {'stall': stall / 2})}\n")
        figures.add(f"memory {json.dumps({'extra': 1 << 29, 'state': 1 << 30})}\n")
    assert row("a way", figures) == "| a way | 0.30 | 0.15 | 1.50 | 0.00 | 2.00 | - | 0.50 |"


def test_a_way_that_fails_is_named() -> None:
    assert row("a way", Figures(failed="no such module")) == "| a way | failed: no such module |"
