"""How a sync is told to people: lines, rates, warnings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner.cli.data import sync
from runner.cli.progress import SyncReport, warning, words
from runner.core.diff import Odd
from runner.dataset.pace import Every, Rate
from runner.dataset.source import LeftOut
from runner.dataset.sync import SyncProgress
from runner.errors import StoreUnreachable


class ByHand:
    """A clock that is set."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def test_a_rate_looks_back_a_few_seconds() -> None:
    clock = ByHand()
    rate = Rate(clock)
    assert rate.after(0) == 0
    for second in range(1, 31):
        clock.time = 100.0 + second
        last = rate.after(1000 * min(second, 20))
        assert last == pytest.approx(1000 if second <= 20 else 1000 * (30 - second) / 10)
    assert last == 0
    assert Rate(clock).after(7) == 0


def test_every_so_often() -> None:
    clock = ByHand()
    every = Every(clock, 2)
    assert (every.is_due(), every.is_due()) == (True, False)
    clock.time += 2
    assert (every.is_due(), every.is_due()) == (True, False)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (SyncProgress("waiting", message="another process is at it"), "another process is at it"),
        (SyncProgress("listing", message="s3://b/p"), "listing s3://b/p"),
        (SyncProgress("listing", message="s3://b/p", listed=12), "listing s3://b/p, 12 objects so far"),
        (SyncProgress("checking", 3, 9), "checking 3 of 9 files"),
        (SyncProgress("copying", 3, 9, MIB, 4 * MIB), "3 of at least 9 files, 1 MiB of at least 4 MiB"),
        (
            SyncProgress("copying", 3, 9, MIB, 4 * MIB, rate=MIB / 2),
            "3 of at least 9 files, 1 MiB of at least 4 MiB, 512 KiB/s",
        ),
        (
            SyncProgress("copying", 3, 9, MIB, 4 * MIB, complete=True, rate=MIB / 2, eta=6.0),
            "3 of 9 files, 1 MiB of 4 MiB, 512 KiB/s, 6s left",
        ),
    ],
)
def test_words(progress: SyncProgress, expected: str) -> None:
    assert words(progress) == expected


def test_one_warning_names_the_first_few() -> None:
    left_out = LeftOut()
    for number in range(7):
        left_out = left_out.add(Odd(f"a//{number}", "an empty name in the path"))
    told = warning(SyncProgress("done", message="s3://b", left_out=left_out))
    assert told.startswith(
        "warning: 7 object(s) of s3://b cannot be files here and are left out: 'a//0' (an empty name"
    )
    assert told.endswith("'a//4' (an empty name in the path); and 2 more")


def test_trouble_is_told_once_in_a_while() -> None:
    said: list[str] = []
    with SyncReport(said.append) as report:
        for _ in range(5):
            report.retrying("list", StoreUnreachable("no answer"), 2.5)
    assert said == ["data: list failed (no answer); trying again in 2.5s"]


def test_the_command_warns_and_its_json_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "fine").write_bytes(b"x")
    (origin / "new\nline").write_bytes(b"x")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    spec = tmp_path / "job.yaml"
    cache = tmp_path / "cache"
    spec.write_text(f"name: j\ncommand: 'true'\ncache: {{dir: {cache}}}\ndata: [{{source: 'file://{origin}'}}]\n")
    done = CliRunner().invoke(sync, [str(spec), "--json"], standalone_mode=False)
    assert done.exception is None
    [row] = json.loads(done.stdout)
    assert (row["files"], row["fetched_files"], row["bytes"]) == (1, 1, 1)
    assert row["left_out"] == {"count": 1, "first": [{"key": "new\nline", "reason": "a control character"}]}
    assert "warning: 1 object(s)" in done.stderr
    assert r"'new\nline' (a control character)" in done.stderr
    again = CliRunner().invoke(sync, [str(spec)], standalone_mode=False)
    assert again.stdout == row["path"] + "\n"
    assert "everything is in the cache" in again.stderr
    assert "warning: 1 object(s)" in again.stderr
