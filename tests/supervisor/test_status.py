"""Status as people and tools read it: retries counted from the journal, and the lines on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import click.testing
import pytest

from runner.checkpoint.layout import LocalLayout, state_dir
from runner.cli.look import status
from runner.core.ledger import Account
from runner.core.ledger import status as status_of
from runner.core.record import Line
from runner.report.retries import Retries, describe, tally
from runner.report.status import render


def struggled(at: float, operation: str, reason: str) -> Line:
    return {"at": at, "event": {"type": "StoreStruggled", "operation": operation, "reason": reason, "wait": 0.5}}


JOURNAL: list[Line] = [
    {"at": 1.0, "event": {"type": "Started", "host": "a"}},
    struggled(2.0, "list", "SlowDown"),
    struggled(3.0, "write", "no answer"),
    {"at": 4.0, "event": {"type": "Noticed", "text": "x"}},
    struggled(5.0, "write", "InternalError"),
]


def retries(*lines: Line) -> dict[str, Any]:
    return describe(reduce(tally, lines, Retries()))


def test_retries_are_counted_by_kind_and_the_last_is_told() -> None:
    assert retries(*JOURNAL) == {
        "total": 3,
        "operations": {"list": 1, "write": 2},
        "last": {"operation": "write", "reason": "InternalError", "at": 5.0},
    }
    assert retries() == {"total": 0, "operations": {}, "last": None}


@pytest.mark.parametrize("event", [{}, {"type": 7}, {"type": "StoreStruggled"}])
def test_a_line_of_an_unknown_shape_ends_nothing(event: Line) -> None:
    known = retries({"at": 9.0, "event": event})
    assert known["total"] == (event.get("type") == "StoreStruggled")


def shown(told: dict[str, Any]) -> dict[str, str]:
    rows = (line.split(maxsplit=1) for line in render(told, 65.0).splitlines())
    return {row[0]: row[1] for row in rows}


def test_a_person_sees_how_many_of_which_kind_and_why() -> None:
    told = status_of("job", Account(), 65.0, alive=True)
    assert shown(told | {"retries": retries(*JOURNAL)})["retries"] == (
        "3 (2 write, 1 list), the last 1m ago: InternalError"
    )
    assert "retries" not in shown(told | {"retries": retries()})


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``cloudrun status`` of a job that has this journal on this machine's disk, and an empty store."""
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    store = tmp_path / "store"
    store.mkdir()
    spec = tmp_path / "job.yaml"
    spec.write_text(f"name: job\ncommand: x\nstore: file://{store}\n")
    local = LocalLayout(state_dir({"XDG_STATE_HOME": str(tmp_path / "STATE")}), tmp_path, "job", f"file://{store}")
    segment = local.journal_segment(1, "a1-abcdef", 1)
    segment.parent.mkdir(parents=True)
    segment.write_text("".join(json.dumps(line) + "\n" for line in JOURNAL))
    return lambda *words: click.testing.CliRunner().invoke(status, [str(spec), *words], catch_exceptions=False).stdout


def test_the_command_tells_them_both_ways(ask: Callable[..., str]) -> None:
    told = json.loads(ask("--json"))
    assert told["retries"] == retries(*JOURNAL)
    assert "3 (2 write, 1 list), the last " in ask()
