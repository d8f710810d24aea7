"""Which keys there are, and which one was probably meant."""

from __future__ import annotations

import difflib
import typing
from functools import cache

from runner.spec.document import Loc, shown
from runner.spec.model import JobSpec, Section

EACH = "*"
"""Stands in a path for the number of a list item."""

_ONE_GIVE_UP = "unknown key: it is about the job, so it stands once, for all stores", "write storage.give_up"

ELSEWHERE: dict[Loc, tuple[str, str]] = {
    ("storage", "s3", "give_up"): _ONE_GIVE_UP,
    ("storage", "obs", "give_up"): _ONE_GIVE_UP,
    ("storage", "file"): ("unknown key: a folder takes no options", "remove it"),
}
"""Message and hint for keys that one could well expect, but that would do nothing there."""


@cache
def known_paths() -> tuple[tuple[str, ...], ...]:
    """Every key of the spec, as a path; the order is that of the model."""
    return tuple(_paths(JobSpec, ()))


def _paths(section: type[Section], before: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, info in section.model_fields.items():
        found.append((*before, name))
        inner, listed = _section_of(info.annotation)
        if inner is not None:
            found += _paths(inner, (*before, name, EACH) if listed else (*before, name))
    return found


def _section_of(annotation: object) -> tuple[type[Section] | None, bool]:
    """The section behind a field's type, and whether the field is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    for argument in typing.get_args(annotation):
        inner, _ = _section_of(argument)
        if inner is not None:
            return inner, typing.get_origin(annotation) is tuple
    return None, False


def suggestion(loc: Loc) -> tuple[str, str]:
    """Message and hint for an unknown key at ``loc``: the nearest known key, or what may stand there."""
    if loc in ELSEWHERE:
        return ELSEWHERE[loc]
    parent, name = loc[:-1], str(loc[-1])
    way = tuple(EACH if isinstance(part, int) else part for part in parent)
    siblings = [path[-1] for path in known_paths() if path[:-1] == way]
    meant = _near(name, siblings, parent, 0.75) or _elsewhere(name) or _near(name, siblings, parent, 0.6)
    if meant:
        return f"unknown key, did you mean {meant}?", ""
    return "unknown key", f"known here: {', '.join(siblings)}" if siblings else ""


def _near(name: str, siblings: list[str], parent: Loc, likeness: float) -> str:
    close = difflib.get_close_matches(name[:100].replace("-", "_").lower(), siblings, n=1, cutoff=likeness)
    return ".".join([*map(str, parent), close[0]]) if close else ""


def _elsewhere(name: str) -> str:
    """A key of that very name in another section: the indentation slipped."""
    for path in known_paths():
        if path[-1] == name.replace("-", "_").lower():
            return ".".join("0" if part == EACH else part for part in path)
    return ""


def near_word(text: str, words: list[str]) -> str:
    """The one of ``words`` that ``text`` probably means, or nothing."""
    close = difflib.get_close_matches(text[:100].lower(), words, n=1)
    return shown(close[0]) if close else ""
