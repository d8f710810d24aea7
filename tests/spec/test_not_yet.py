"""What comes later is said; what works is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.spec import load_spec, not_yet
from runner.spec.known import known_paths
from runner.spec.not_yet import LATER

OK = "name: a\ncommand: b\n"

TABLE = [
    ("data:\n  - source: file:///x\n    mode: stream", "5:11: data.0.mode: stream"),
    ("interruption: {rebalance: leave}", "3:27: interruption.rebalance: this key"),
    ("limits: {idle: 5m}", "3:16: limits.idle: this key"),
    ("limits: {startup: none}", "3:19: limits.startup: this key"),
    ("slowdown: {threshold: 10 %}", "3:23: slowdown.threshold: this key"),
    ("nodes: {max: 2}", "3:14: nodes.max: this key"),
    ("on_finish: poweroff", "3:12: on_finish.do: poweroff"),
    ("on_failure: {after: 5m}", "3:21: on_failure.after: this key"),
    ("notify: [{command: x}]", "3:9: notify: this key"),
    ("metrics: {textfile: x}", "3:21: metrics.textfile: this key"),
    ("logs: {keep: 5}", "3:14: logs.keep: this key"),
]


@pytest.mark.parametrize(("text", "expected"), TABLE, ids=[text for text, _ in TABLE])
def test_what_comes_later(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(OK + text, encoding="utf-8")
    found = not_yet(load_spec(path, environ={}))
    assert [str(problem) for problem in found] == [f"{path}:{expected} is not in this version yet"]
    assert found[0].hint


def test_defaults_that_are_written_out_are_no_news(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"{OK}limits: {{startup: 1h, idle: 15m, cost: }}\nnodes: {{min: 1, max: 1}}\non_finish: exit\n"
        "notify: []\nslowdown: {threshold: 30%}\nstorage: {requester_pays: false}\n"
        "checkpoints: {inject: false, ask: }\nlogs: {keep: all}\n",
        encoding="utf-8",
    )
    assert not_yet(load_spec(path, environ={})) == ()


def test_what_works_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"{OK}store: file:///s\nstorage: {{give_up: 2h}}\nsetup: x\nworkdir: .\nenv: {{A: b}}\n"
        "data: [{source: 'file:///x', target: t, include: a, exclude: b, verify: true, extract: never}]\n"
        "cache: {dir: c, limit: 5GB}\nlogs: {upload_every: 1s}\nprice: {per_hour: 1}\nstop: {signal: INT, grace: 1s}\n"
        "checkpoints: {dir: out, format: any, every: 1m, keep: {last: 1, every: 5}, resume: x}\n"
        "restart: {max_without_progress: 1, on_exit: {3: fail}, fatal_patterns: x, retry_patterns: y}\n"
        "progress: {pattern: '(?P<step>.)'}\n",
        encoding="utf-8",
    )
    assert not_yet(load_spec(path, environ={})) == ()


def test_every_row_names_a_known_key() -> None:
    known = {".".join(path) for path in known_paths()}
    assert {row.key.removesuffix(".**") for row in LATER} <= known
