"""What a spec may say already but this version cannot do yet, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from runner.spec.document import Loc
from runner.spec.known import EACH, known_paths
from runner.spec.load import problem_at
from runner.spec.model import JobSpec, Section
from runner.spec.problems import Problem, in_order

Test = Callable[[object], bool]


class Later(NamedTuple):
    """A key (``*`` is any item, a final ``**`` all keys below), what of it comes later, and what to do today.

    Without ``when`` it is every value but the default. ``{value}`` in ``what`` is the value: only for fixed words.
    """

    key: str
    what: str = "this key"
    hint: str = "remove it, or wait for a later version"
    when: Test | None = None


LATER = (
    Later("data.*.mode", "{value}", "write mode: copy"),
    Later("interruption.**"),
    Later("limits.**"),
    Later("slowdown.**"),
    Later("nodes.**", hint="this version trains on one machine: start torchrun in the command for several GPUs"),
    Later("on_finish.do", "{value}", "write exit, and end the machine from outside"),
    Later("on_finish.after"),
    Later("on_failure.do", "{value}", "write exit, and end the machine from outside"),
    Later("on_failure.after"),
    Later("notify"),
    Later("metrics.**"),
    Later("logs.keep"),
)


def not_yet(spec: JobSpec) -> tuple[Problem, ...]:
    """Everything the spec asks for that this version does not do, in the order of the file."""
    found = (problem for row in LATER for problem in _asked(spec, row))
    return tuple(in_order(found, spec.origin.tree.spot.file))


def _asked(spec: JobSpec, row: Later) -> Iterator[Problem]:
    for loc, value, default in (found for key in _keys(row.key) for found in _values(spec, key, ())):
        if row.when(value) if row.when else value != default:
            what = row.what.format(value=value)
            key = ".".join(map(str, loc))
            yield problem_at(spec, key, f"{what} is not in this version yet", row.hint)


def _keys(key: str) -> list[tuple[str, ...]]:
    """The paths that a row means."""
    way = tuple(key.split("."))
    return [path for path in known_paths() if path[:-1] == way[:-1]] if way[-1] == "**" else [way]


def _values(section: Section, way: tuple[str, ...], before: Loc) -> Iterator[tuple[Loc, object, object]]:
    """Where the path leads in this spec: place, value and default."""
    name, rest = way[0], way[1:]
    value = getattr(section, name)
    if not rest:
        yield (*before, name), value, type(section).model_fields[name].get_default(call_default_factory=True)
    elif rest[0] == EACH:
        for index, item in enumerate(value):
            yield from _values(item, rest[1:], (*before, name, index))
    else:
        yield from _values(value, rest, (*before, name))
