"""The JSON Schema says what the model says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from runner.cli.main import cloudrun
from runner.spec import schema
from runner.spec.known import known_paths

SCHEMA = schema()
OK = {"name": "a", "command": "b"}
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def fits(value: Any, part: dict[str, Any]) -> bool:
    """A small judge of JSON Schema: the words that ours uses."""
    if "$ref" in part and not fits(value, SCHEMA["$defs"][part["$ref"].removeprefix("#/$defs/")]):
        return False
    kinds = [part["type"]] if isinstance(part.get("type"), str) else part.get("type", [])
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if any(word in part and value not in part[word] for word in ("enum",)) or value != part.get("const", value):
        return False
    if "anyOf" in part and not any(fits(value, choice) for choice in part["anyOf"]):
        return False
    if "oneOf" in part and sum(fits(value, choice) for choice in part["oneOf"]) != 1:
        return False
    if isinstance(value, str) and ("pattern" in part and not re.search(part["pattern"], value)):
        return False
    if isinstance(value, (int, float)) and not part.get("minimum", value) <= value <= part.get("maximum", value):
        return False
    if isinstance(value, list):
        return all(fits(item, part.get("items", {})) for item in value)
    return not isinstance(value, dict) or _members_fit(value, part)


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _members_fit(value: dict[str, Any], part: dict[str, Any]) -> bool:
    known, other = part.get("properties", {}), part.get("additionalProperties", True)
    return set(part.get("required", [])) <= set(value) and all(
        fits(item, known[key]) if key in known else other if isinstance(other, bool) else fits(item, other)
        for key, item in value.items()
    )


GOOD = """
store: file:///x
storage: {give_up: 2h, s3: {concurrency: 3}}
command: [python, train.py, --epochs, 3]
env: {A: 1, B: text, C: true}
secrets: TOKEN
data: [{source: "s3://bucket/x", include: "*.jpg", mode: copy}]
cache: {limit: 90 %}
checkpoints: {every: "${EVERY:-10m}", format: "${FORMAT}", keep: {last: "${N}", every: 1d}, resume: --resume}
stop: {signal: 15, grace: 1h30m}
limits: {startup: none, runtime: 1d, cost: "${COST}"}
restart: {on_exit: {"3": fail}}
nodes: {processes_per_node: auto}
on_finish: poweroff
on_failure: {do: exit, after: 5m}
notify: [{url: "https://x", "on": [failed]}]
"""


def test_a_good_spec_fits() -> None:
    assert fits({"name": "a", **yaml.safe_load(GOOD)}, SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "A B"},
        {"script": "beside command"},
        {"zzz": 1},
        {"stop": {"grase": "3s"}},
        {"stop": {"grace": "3 weeks"}},
        {"nodes": {"port": 0}},
        {"nodes": {"port": "80"}},
        {"version": 2},
        {"checkpoints": {"format": "torhc"}},
        {"checkpoints": {"keep": {"last": 0}}},
        {"data": [{"target": "x"}]},
        {"store": "/x"},
        {"notify": [{"on": ["never"]}]},
        {"on_finish": "reboot"},
        {"restart": {"on_exit": {"3": "fial"}}},
    ],
    ids=str,
)
def test_a_bad_spec_does_not_fit(wrong: dict[str, Any]) -> None:
    assert fits(OK, SCHEMA)
    assert not fits({**OK, **wrong}, SCHEMA)


def test_every_key_is_known_and_described() -> None:
    described = set(_described(SCHEMA, ()))
    assert described == set(known_paths())


def _described(part: dict[str, Any], way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    choices = [part, *part.get("anyOf", [])]
    for name, inner in (pair for choice in choices for pair in choice.get("properties", {}).items()):
        target = SCHEMA["$defs"].get(_reference(inner), {})
        assert inner.get("description") or target.get("description"), (*way, name)
        yield (*way, name)
        item = SCHEMA["$defs"].get(_reference(inner.get("items", {})), {})
        yield from _described(item, (*way, name, "*")) if item else _described(target, (*way, name))


def _reference(part: dict[str, Any]) -> str:
    places = [part, *part.get("anyOf", [])]
    names = [place["$ref"].removeprefix("#/$defs/") for place in places if "$ref" in place]
    return next((name for name in names if name != "FromEnvironment"), "")


def test_no_section_takes_unknown_keys() -> None:
    parts = [SCHEMA, *SCHEMA["$defs"].values()]
    choices = [choice for part in parts for choice in (part, *part.get("anyOf", []))]
    sections = [choice for choice in choices if "properties" in choice]
    assert all(section["additionalProperties"] is False for section in sections)
    assert len(sections) > 15


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(cloudrun, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.output) == json.loads(json.dumps(SCHEMA))


def test_defaults_are_as_people_write_them() -> None:
    assert SCHEMA["$defs"]["Stop"]["properties"]["grace"]["default"] == "30s"
    assert SCHEMA["$defs"]["Limits"]["properties"]["startup"]["default"] == "60m"
    assert SCHEMA["$defs"]["Cache"]["properties"]["limit"]["default"] == "90 %"
    assert "null" not in json.dumps(SCHEMA)
