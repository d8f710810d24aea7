"""The JSON Schema of the spec as people write it, made from the model."""

from __future__ import annotations

from typing import Any

from runner.spec.model import JobSpec

INTERPOLATED = {"$ref": "#/$defs/FromEnvironment"}
_DEFINITION = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "A value from the environment: `${NAME}`, `${NAME:-default}` or `${NAME:?message}`.",
}
_TYPED = ("integer", "number", "boolean")


def schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) for editors and other tools: every key with its meaning, no key that is not known."""
    made = JobSpec.model_json_schema(mode="validation", by_alias=False)
    definitions = {name: _tidy(part) for name, part in made.pop("$defs", {}).items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cloudrun job spec",
        **{key: value for key, value in _tidy(made).items() if key != "title"},
        "oneOf": [{"required": ["command"]}, {"required": ["script"]}],
        "$defs": {**definitions, "FromEnvironment": _DEFINITION},
    }


def _tidy(part: Any) -> Any:
    """Without machine-made titles and nulls; with room for variables beside numbers, booleans and fixed words."""
    if isinstance(part, list):
        return [_tidy(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {key: _tidy_member(key, value) for key, value in part.items() if not _is_noise(key, value)}
    return _or_interpolated(_without_null(kept))


def _tidy_member(key: str, value: Any) -> Any:
    if key in ("properties", "patternProperties"):
        return {name: _tidy(inner) for name, inner in value.items()}
    return value if key in ("default", "examples", "required", "enum") else _tidy(value)


def _is_noise(key: str, value: Any) -> bool:
    return (key == "title" and isinstance(value, str)) or (key == "default" and value is None)


def _without_null(part: dict[str, Any]) -> dict[str, Any]:
    choices = [choice for choice in part.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        return {**choices[0], **{key: value for key, value in part.items() if key != "anyOf"}}
    return {**part, "anyOf": choices} if choices else part


def _or_interpolated(part: dict[str, Any]) -> dict[str, Any]:
    typed = part.get("type") in _TYPED or "enum" in part or ("const" in part and "type" in part)
    if not typed:
        return part
    about: dict[str, Any] = {key: part[key] for key in ("description", "default", "examples") if key in part}
    return {**about, "anyOf": [{key: value for key, value in part.items() if key not in about}, INTERPOLATED]}
