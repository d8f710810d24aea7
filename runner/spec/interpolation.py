"""``${NAME}`` in values: filled from the environment, never read as YAML, never shown in an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from runner.spec.document import Loc, Node, Scalar, map_scalars, shown
from runner.spec.problems import Problem

MAX_LETTERS = 4 * 1024 * 1024

BASH_TEXTS = (("script",), ("setup",))
"""Values in which ``${...}`` belongs to bash, which sees the same environment."""

_REFERENCE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?:(:[-?])((?:(?!\$\{)[^}])*))?\}|)", re.ASCII)
_FORMS = "the forms are ${NAME}, ${NAME:-default} and ${NAME:?message}; $${ is a literal ${"


def interpolate(tree: Node, environ: Mapping[str, str], problems: list[Problem]) -> Node:
    """The tree with every reference filled. A value that cannot be filled is marked as failed."""
    return map_scalars(tree, _Filler(environ, problems).fill)


class _Filler:
    def __init__(self, environ: Mapping[str, str], problems: list[Problem]) -> None:
        self._environ = environ
        self._problems = problems
        self._letters_left = MAX_LETTERS

    def fill(self, loc: Loc, scalar: Scalar) -> Scalar:
        if "${" not in scalar.text or loc in BASH_TEXTS:
            return scalar
        pieces: list[str] = []
        end = 0
        outside = failed = False
        for match in _REFERENCE.finditer(scalar.text):
            literal = match[0] == "$${"
            piece = "${" if literal else self._lookup(match, loc, scalar)
            failed = failed or piece is None
            outside = outside or not literal
            pieces += [scalar.text[end : match.start()], piece or ""]
            self._letters_left -= len(piece or "")
            if self._letters_left < 0:
                return self._too_long(loc, scalar)
            end = match.end()
        text = "".join([*pieces, scalar.text[end:]])
        return replace(scalar, text=text, outside=outside, failed=scalar.failed or failed)

    def _lookup(self, match: re.Match[str], loc: Loc, scalar: Scalar) -> str | None:
        """What stands for one reference; None after a problem was noted."""
        name, operator, argument = match.groups()
        if name is None:
            self._note(loc, scalar, "a ${ that is no reference", _FORMS)
            return None
        value = self._environ.get(name)
        if value and "\0" not in value:
            return value
        if operator == ":-":
            return str(argument)
        if operator == ":?":
            reason = shown(argument, 200) or "is required"
            self._note(loc, scalar, f"${{{name}}} is not set: {reason}", _how_to_set(name))
            return None
        if value is None:
            hint = f"{_how_to_set(name)}, or give a default: ${{{name}:-default}}"
            self._note(loc, scalar, f"${{{name}}} is not set in the environment", hint)
        return value

    def _note(self, loc: Loc, scalar: Scalar, message: str, hint: str) -> None:
        self._problems.append(scalar.spot.problem(loc, message, hint))

    def _too_long(self, loc: Loc, scalar: Scalar) -> Scalar:
        self._note(loc, scalar, "grows beyond all bounds when its references are filled", "use shorter values")
        return replace(scalar, text="", failed=True, outside=True)


def _how_to_set(name: str) -> str:
    return f"set it first: export {name}=..."
