"""Every key of the job spec as tables, from the schema and from the list of what is not there yet.

python -m scripts.spec_reference            print them
python -m scripts.spec_reference --write    put them into docs/guides/job-spec.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.spec import schema
from runner.spec.not_yet import LATER, Later
from scripts.pages import GUIDES, print_or_write

PAGE = GUIDES / "job-spec.md"
NAME = "reference"

Part = dict[str, Any]
ORDER = ("storage", "data", "cache", "checkpoints", "stop", "restart", "progress", "price", "logs")
"""Sections that do something today come first, the others after them in the order of the model."""


def reference() -> str:
    """All keys, one table for the top level and one for each section."""
    whole = schema()
    definitions = whole["$defs"]
    required = {*whole["required"], "command", "script"}
    sections = {name: part for name, part in whole["properties"].items() if keys_of(part, definitions)}
    plain = {name: part for name, part in whole["properties"].items() if name not in sections}
    blocks = [block("Top level", "", rows(plain, "", definitions, required))]
    for name in (*ORDER, *(name for name in sections if name not in ORDER)):
        listed = "[]" if sections[name].get("type") == "array" else ""
        about = sections[name].get("description") or definition(sections[name], definitions)["description"]
        blocks.append(block(f"`{name}`", about, section_rows(sections[name], f"{name}{listed}", definitions)))
    return "\n".join(blocks)


def block(title: str, about: str, lines: Iterator[str]) -> str:
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"### {title}", "", *([about, ""] if about else []), *head, *lines]) + "\n"


def section_rows(part: Part, path: str, definitions: Part) -> Iterator[str]:
    section = definition(part, definitions)
    yield from rows(section["properties"], f"{path}.", definitions, set(section.get("required", ())))


def rows(parts: dict[str, Part], before: str, definitions: Part, required: set[str]) -> Iterator[str]:
    """One line a key; a section within a section follows its key, unless it only repeats the keys around it."""
    for name, part in parts.items():
        inner = keys_of(part, definitions)
        if inner and not inner.keys() <= parts.keys():
            yield from section_rows(part, f"{before}{name}", definitions)
            continue
        kind = "the same keys again" if inner else kind_of(part)
        default = "required" if name in required else default_of(part)
        if f"{before}{name}" in ("command", "script"):
            default = "one of the two"
        about = part.get("description", "")
        cells = (f"`{before}{name}`", kind, default, f"{remark(f'{before}{name}', part)}{about}")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def definition(part: Part, definitions: Part) -> Part:
    """The section behind a reference, behind a list of them, or beside its own short form; empty for a plain value."""
    reference = part.get("$ref") or part.get("items", {}).get("$ref", "")
    found: Part = definitions.get(reference.removeprefix("#/$defs/"), {})
    return next((choice for choice in found.get("anyOf", ()) if "properties" in choice), found)


def keys_of(part: Part, definitions: Part) -> Part:
    keys: Part = definition(part, definitions).get("properties", {})
    return keys


# --- types and defaults ---


def kind_of(part: Part) -> str:
    """The type of a value in words."""
    choices = [choice for choice in part.get("anyOf", ()) if "$ref" not in choice]
    if choices:
        return " or ".join(dict.fromkeys(kind_of(choice) for choice in choices))
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return ", ".join(f"`{word}`" for word in part["enum"])
    if part.get("type") == "array":
        items = kind_of(part["items"])
        return f"list of {items}" if items.startswith("`") else f"list of {items.split(' or ', 1)[0]}s"
    return scalar(part)


def scalar(part: Part) -> str:
    if "(ms|s|m|h|d)" in part.get("pattern", ""):
        return "duration"
    if "://" in part.get("pattern", ""):
        return "URL"
    if part.get("type") == "integer":
        return f"whole number{bounds(part)}"
    if part.get("type") == "object":
        values = kind_of(part["additionalProperties"])
        return f"mapping to {values}"
    kinds = part.get("type", "value")
    words = {"string": "text", "boolean": "true or false", "integer": "whole number", "number": "number"}
    listed = [kinds] if isinstance(kinds, str) else kinds
    return "text" if set(listed) == {"string", "number", "boolean"} else " or ".join(words[kind] for kind in listed)


def bounds(part: Part) -> str:
    least, most = part.get("minimum"), part.get("maximum")
    if least is None:
        return ""
    return f" from {least}" if most is None else f", {least} to {most}"


def default_of(part: Part) -> str:
    value = part.get("default")
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, list):
        return "all of them"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- not yet ---


def remark(path: str, part: Part) -> str:
    """What of this key is not there yet, in front of its meaning."""
    later = next((row for row in LATER if is_of(row, path)), None)
    if later is None:
        return ""
    if later.when is None and later.what == "this key":
        return "**Not yet.** "
    if "{value}" in later.what:
        words = [word for word in enum_of(part) if is_later(later, word, part)]
        return f"**Not yet: {', '.join(f'`{word}`' for word in words)}.** "
    return f"**Not yet: {later.what}.** "


def is_of(row: Later, path: str) -> bool:
    way, wanted = path.replace("[]", ".*").split("."), row.key.split(".")
    return way[: len(wanted) - 1] == wanted[:-1] if wanted[-1] == "**" else way[: len(wanted)] == wanted


def is_later(row: Later, word: str, part: Part) -> bool:
    return row.when(word) if row.when else word != part.get("default")


def enum_of(part: Part) -> list[str]:
    choices = [choice["enum"] for choice in part.get("anyOf", ()) if "enum" in choice]
    words: list[str] = part.get("enum") or (choices[0] if choices else [])
    return words


if __name__ == "__main__":
    print_or_write(PAGE, NAME, reference())
