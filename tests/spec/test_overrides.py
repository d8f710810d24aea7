"""``--set`` puts one value over the file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.spec import JobSpec, load_spec

TEXT = """\
name: a
command: b
stop:
data: [{source: "file:///x", target: x}, {source: "file:///y", target: y}]
restart: {max_without_progress: 2}
store: ${NOT_SET}
"""


def load(folder: Path, *overrides: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return load_spec(path, overrides=("store=file:///s", *overrides), environ={"N": "7", "EVIL": "{a: b}: [c"})


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("restart.max_without_progress=30", "restart.max_without_progress", 30),
        ("restart.max_without_progress=${N}", "restart.max_without_progress", 7),
        ("restart.backoff.first=1s", "restart.backoff.first", 1.0),
        ("stop.grace=1m", "stop.grace", 60.0),
        ("env.FOO=bar", "env", {"FOO": "bar"}),
        ("env.FOO=1", "env", {"FOO": "1"}),
        ("env.FOO=a=b", "env", {"FOO": "a=b"}),
        ("env.FOO=x: y # z", "env", {"FOO": "x: y # z"}),
        ("env.FOO=*.jpg", "env", {"FOO": "*.jpg"}),
        ("env.FOO=${EVIL}", "env", {"FOO": "{a: b}: [c"}),
        ('name="2024"', "name", "2024"),
        ("command=[x, y z]", "command", ("x", "y z")),
        ("checkpoints={every: 5m, keep: {last: 1}}", "checkpoints.keep.last", 1),
        ("secrets=[]", "secrets", ()),
    ],
)
def test_values(tmp_path: Path, override: str, path: str, value: object) -> None:
    found: object = load(tmp_path, override)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_an_item_of_a_list(tmp_path: Path) -> None:
    assert [entry.target for entry in load(tmp_path, "data.1.target=z").data] == ["x", "z"]


def test_what_is_replaced_is_not_looked_at(tmp_path: Path) -> None:
    assert load(tmp_path).store == "file:///s"


def test_the_last_one_wins_and_the_rest_of_the_section_stays(tmp_path: Path) -> None:
    spec = load(tmp_path, "stop.grace=1m", "stop.grace=2m", "restart.backoff.first=1s")
    assert spec.stop.grace == 120.0
    assert spec.restart.max_without_progress == 2
