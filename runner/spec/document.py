"""A YAML text as a tree in which every key and every value knows its place. Nothing in it is ever executed.

Hostile texts are refused early: size, depth, and the number of nodes after aliases are followed are bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

from runner.spec.problems import Problem, SpecInvalid

MAX_BYTES = 1024 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 50
OVERRIDE_FILE = "--set"

_TAG = "tag:yaml.org,2002:"
_PLAIN = "!plain"
_RESOLVED_TAGS = {_PLAIN, *(_TAG + kind for kind in ("int", "float", "bool", "null"))}
_BOOLEANS = {word: word in ("yes", "on", "true") for word in ("yes", "no", "on", "off", "true", "false")}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,99})", re.ASCII)
_BASED_INTEGER = re.compile(r"0(?:x[0-9a-fA-F]{1,99}|o[0-7]{1,99}|b[01]{1,99})", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]{0,99}\.?[0-9]{0,99}|\.[0-9]{1,99})(?:[eE][-+]?[0-9]{1,9})?", re.ASCII)
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", re.ASCII)

Loc = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Spot:
    file: str
    line: int
    column: int

    def problem(self, loc: Loc, message: str, hint: str = "") -> Problem:
        return Problem(self.file, self.line, self.column, dotted(loc), message, hint)


@dataclass(frozen=True, slots=True)
class Scalar:
    """``plain`` is true when it was written without quotes, so that YAML decides what kind it is.

    ``outside`` is true when part of the text came from the environment: it must not be shown to anyone.
    ``failed`` is true when a problem with it is known already.
    """

    spot: Spot
    text: str
    plain: bool = True
    outside: bool = False
    failed: bool = False


@dataclass(slots=True)
class Listing:
    spot: Spot
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Mapping:
    """Keys are always text, as written: ``on`` is no boolean and ``1`` no number."""

    spot: Spot
    entries: dict[str, tuple[Spot, Node]] = field(default_factory=dict)


Node = Scalar | Listing | Mapping


def dotted(loc: Loc) -> str:
    """``("data", 0, "mode")`` as people write it: ``data.0.mode``. Control characters are escaped, long keys cut."""
    return ".".join(shown(str(part)) for part in loc)


def shown(text: str, limit: int = 60) -> str:
    """Text that is safe on a terminal: one short line."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: limit + 1])
    return line if len(text) <= limit else f"{line[:limit]}..."


def parse(text: str, file: str, problems: list[Problem]) -> Mapping:
    """The spec as a tree. Faults that leave a tree are added to ``problems``; others raise SpecInvalid."""
    start = Spot(file, 1, 1)
    tree = _build(text, start, problems)
    if tree is None:
        raise SpecInvalid([start.problem((), "is empty", "write at least `name: ...` and `command: ...`")])
    if not isinstance(tree, Mapping):
        raise SpecInvalid([tree.spot.problem((), "must be a mapping of keys to values", "such as `name: digits`")])
    tree.spot = start
    return tree


def parse_value(text: str, spot: Spot, problems: list[Problem]) -> Node:
    """The value of an override: a list, a mapping or a quoted text as in YAML; anything else is one plain scalar."""
    if text.lstrip()[:1] in ("[", "{", '"', "'"):
        return _build(text, spot, problems) or Scalar(spot, "")
    return Scalar(spot, text.strip())


def _build(text: str, start: Spot, problems: list[Problem]) -> Node | None:
    try:
        node = _BoundedLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = text.split("\n")[mark.line] if mark and mark.line < text.count("\n") + 1 else ""
        raise SpecInvalid([_at(start, mark).problem((), *_explained(error, line))]) from None
    except yaml.reader.ReaderError as error:
        raise SpecInvalid([_unreadable(text, error, start)]) from None
    return None if node is None else _Builder(start, problems).build(node, (), 0)


def _at(start: Spot, mark: yaml.Mark | None) -> Spot:
    if mark is None:
        return start
    column = mark.column + (start.column if mark.line == 0 else 1)
    return Spot(start.file, start.line + mark.line, column)


def _explained(error: yaml.MarkedYAMLError, line: str) -> tuple[str, str]:
    problem = shown(error.problem or error.context or "cannot be read", 200)
    if "\\t" in problem:
        return "a tab cannot indent in YAML", "indent with spaces"
    if "${" in line:
        return f"not valid YAML: {problem}", "inside {...} and [...] a ${NAME} needs quotes, or a line of its own"
    hint = "put the value in quotes" if "mapping values" in problem or "cannot start" in problem else ""
    return f"not valid YAML: {problem}", hint


def _unreadable(text: str, error: yaml.reader.ReaderError, start: Spot) -> Problem:
    before = text[: error.position]
    spot = Spot(start.file, start.line + before.count("\n"), len(before) - before.rfind("\n"))
    return spot.problem((), "holds a control character that YAML does not allow", "save the file as plain UTF-8 text")


class _BoundedLoader(yaml.SafeLoader):
    """Composes nodes, builds no objects; leaves to us what a plain scalar means; refuses deep and endless texts."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: object) -> str:
        if kind is yaml.ScalarNode and isinstance(implicit, tuple) and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, (False, False))  # type: ignore[no-any-return, no-untyped-call]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_NODES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=_bound_message(self._depth), problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _bound_message(depth: int) -> str:
    return f"nested deeper than {MAX_DEPTH}" if depth > MAX_DEPTH else f"more than {MAX_NODES} values"


class _Builder:
    """Turns composed nodes into our tree; follows aliases, within the bounds."""

    def __init__(self, start: Spot, problems: list[Problem]) -> None:
        self._start = start
        self._problems = problems
        self._nodes = MAX_NODES
        self._letters = 2 * MAX_BYTES

    def build(self, node: yaml.Node, loc: Loc, depth: int) -> Node:
        spot = _at(self._start, node.start_mark)
        self._spend(node, spot, loc, depth)
        if isinstance(node, yaml.MappingNode):
            self._refuse_tag(node.tag, {f"{_TAG}map"}, spot, loc)
            return self._mapping(node, spot, loc, depth)
        if isinstance(node, yaml.SequenceNode):
            self._refuse_tag(node.tag, {f"{_TAG}seq"}, spot, loc)
            items = [self.build(child, (*loc, index), depth + 1) for index, child in enumerate(node.value)]
            return Listing(spot, items)
        failed = self._refuse_tag(node.tag, _RESOLVED_TAGS | {f"{_TAG}str"}, spot, loc)
        return Scalar(spot, node.value, plain=node.tag in _RESOLVED_TAGS, failed=failed)

    def _spend(self, node: yaml.Node, spot: Spot, loc: Loc, depth: int) -> None:
        self._nodes -= 1
        self._letters -= len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if depth > MAX_DEPTH or self._nodes < 0 or self._letters < 0:
            hint = "write the values out, or use fewer aliases"
            raise SpecInvalid([spot.problem(loc[:5], "grows beyond all bounds when its aliases are followed", hint)])

    def _refuse_tag(self, tag: str, known: set[str], spot: Spot, loc: Loc) -> bool:
        if tag in known:
            return False
        name = shown(tag.replace(_TAG, "!!"))
        self._problems.append(spot.problem(loc, f"the tag {name} is not allowed", "a spec is data: remove the tag"))
        return True

    def _mapping(self, node: yaml.MappingNode, spot: Spot, loc: Loc, depth: int) -> Mapping:
        mapping = Mapping(spot)
        merged = [value for key, value in node.value if _is_merge(key)]
        for key, value in node.value:
            if not _is_merge(key):
                self._entry(mapping, key, value, loc, depth)
        for value in merged:
            self._merge(mapping, value, loc, depth)
        return mapping

    def _entry(self, mapping: Mapping, key: yaml.Node, value: yaml.Node, loc: Loc, depth: int) -> None:
        spot = _at(self._start, key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            self._problems.append(spot.problem(loc, "a key must be plain text"))
            return
        name = key.value
        if name in mapping.entries:
            first = mapping.entries[name][0]
            message = f"given twice, first on line {first.line}, column {first.column}"
            self._problems.append(spot.problem((*loc, name), message, "keep one of the two"))
        mapping.entries[name] = (spot, self.build(value, (*loc, name), depth + 1))

    def _merge(self, mapping: Mapping, value: yaml.Node, loc: Loc, depth: int) -> None:
        for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            merged = self.build(part, loc, depth + 1)
            if not isinstance(merged, Mapping):
                self._problems.append(merged.spot.problem(loc, "<< needs a mapping to take keys from"))
                continue
            for name, entry in merged.entries.items():
                mapping.entries.setdefault(name, entry)


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.tag == _PLAIN and key.value == "<<"


def value_of(scalar: Scalar) -> str | int | float | bool | None:
    """What YAML means by it: text where it was quoted; else null, boolean, number or text."""
    if not scalar.plain:
        return scalar.text
    text = scalar.text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in _BOOLEANS and text in (text.lower(), text.capitalize(), text.upper()):
        return _BOOLEANS[text.lower()]
    return _number(text)


def _number(text: str) -> str | int | float:
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _BASED_INTEGER.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    infinite = _INFINITE.fullmatch(text)
    if infinite:
        return math.nan if infinite[1] is None else float(f"{infinite[1]}inf")
    return text


def map_scalars(node: Node, change: Callable[[Loc, Scalar], Scalar], loc: Loc = ()) -> Node:
    """The same tree with every scalar replaced by what ``change`` makes of it."""
    if isinstance(node, Scalar):
        return change(loc, node)
    if isinstance(node, Listing):
        return Listing(node.spot, [map_scalars(item, change, (*loc, i)) for i, item in enumerate(node.items)])
    entries = {key: (spot, map_scalars(value, change, (*loc, key))) for key, (spot, value) in node.entries.items()}
    return Mapping(node.spot, entries)


def scalars(node: Node, loc: Loc = ()) -> Iterator[tuple[Loc, Scalar]]:
    """Every scalar below ``node`` with the way to it."""
    if isinstance(node, Scalar):
        yield loc, node
    elif isinstance(node, Listing):
        for index, item in enumerate(node.items):
            yield from scalars(item, (*loc, index))
    else:
        for key, (_, value) in node.entries.items():
            yield from scalars(value, (*loc, key))


def to_python(node: Node, keeps_text: Callable[[Loc], bool], loc: Loc = ()) -> object:
    """Plain Python values: dicts, tuples and what ``value_of`` says; the text itself where ``keeps_text`` says so."""
    if isinstance(node, Scalar):
        value = value_of(node)
        return node.text if keeps_text(loc) and value is not None else value
    if isinstance(node, Listing):
        return tuple(to_python(item, keeps_text, (*loc, index)) for index, item in enumerate(node.items))
    return {key: to_python(value, keeps_text, (*loc, key)) for key, (_, value) in node.entries.items()}


def find(root: Node, loc: Loc) -> tuple[Spot, Spot, Node, bool]:
    """Where ``loc`` leads, as far as it exists: the place of its key, of its value, the value, and if all is there."""
    key_spot, node = root.spot, root
    for part in loc:
        if isinstance(node, Mapping) and str(part) in node.entries:
            key_spot, node = node.entries[str(part)]
        elif isinstance(node, Listing) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            key_spot = node.spot
        else:
            return key_spot, node.spot, node, False
    return key_spot, node.spot, node, True
