"""``--set key.path=value``: one value put over what the file says."""

from __future__ import annotations

from collections.abc import Sequence

from runner.spec.document import OVERRIDE_FILE, Listing, Loc, Mapping, Node, Scalar, Spot, parse_value, value_of
from runner.spec.problems import Problem, SpecInvalid

FORM = "write --set key.path=value, such as --set restart.max_without_progress=30"


def apply_overrides(tree: Mapping, overrides: Sequence[str], problems: list[Problem]) -> None:
    """Change ``tree`` in place, in the order given. What cannot be applied is added to ``problems``."""
    for number, text in enumerate(overrides, start=1):
        try:
            _apply(tree, text, Spot(OVERRIDE_FILE, number, 1), problems)
        except SpecInvalid as error:
            problems.extend(error.problems)


def _apply(tree: Mapping, text: str, spot: Spot, problems: list[Problem]) -> None:
    path, equals, written = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecInvalid([spot.problem((), "an override needs a key and a value", FORM)])
    value = parse_value(written, Spot(spot.file, spot.line, len(path) + 2), problems)
    node: Node = tree
    for depth, key in enumerate(keys[:-1]):
        node = _child(node, key, keys[: depth + 1], spot)
    _put(node, keys, spot, value)


def _child(node: Node, key: str, way: Sequence[str], spot: Spot) -> Node:
    """The container below ``key``; made when there is none yet."""
    if isinstance(node, Listing):
        return node.items[_index(node, way, spot)]
    if not isinstance(node, Mapping):
        raise _not_a_mapping(way[:-1], spot)
    _, child = node.entries.get(key, (spot, Scalar(spot, "")))
    if isinstance(child, Scalar) and value_of(child) is None:
        child = Mapping(spot)
        node.entries[key] = (spot, child)
    return child


def _put(node: Node, keys: Sequence[str], spot: Spot, value: Node) -> None:
    if isinstance(node, Listing):
        node.items[_index(node, keys, spot)] = value
    elif isinstance(node, Mapping):
        node.entries[keys[-1]] = (spot, value)
    else:
        raise _not_a_mapping(keys[:-1], spot)


def _index(node: Listing, way: Sequence[str], spot: Spot) -> int:
    if way[-1].isdecimal() and len(way[-1]) < 6 and int(way[-1]) < len(node.items):
        return int(way[-1])
    hint = f"the list has {len(node.items)} items, counted from 0" if node.items else "the list is empty"
    raise SpecInvalid([spot.problem(_loc(way), "there is no such item", hint)])


def _not_a_mapping(way: Sequence[str], spot: Spot) -> SpecInvalid:
    return SpecInvalid([spot.problem(_loc(way), "holds one value, so nothing can be set below it")])


def _loc(way: Sequence[str]) -> Loc:
    return tuple(way)
