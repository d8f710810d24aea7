"""Files of NAME=VALUE lines. Their values may be secrets: no message shows one."""

from __future__ import annotations

import re
from pathlib import Path

from runner.spec.document import MAX_BYTES, Spot
from runner.spec.problems import Problem, Wrong

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)", re.ASCII | re.DOTALL)
_QUOTED = re.compile(r"""(?:'([^']*)'|"((?:[^"\\]|\\.)*)")\s*(?:#.*)?""", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def read_env_file(path: Path, problems: list[Problem]) -> dict[str, str]:
    """The variables of the file, the last of a name wins. Bad lines are added to ``problems``.

    Comments, empty lines, ``export`` and quotes are known; nothing is filled in. Raises Wrong when there is no such
    file, or it is no text.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(_text(path).split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        value = _value(match[2]) if match else None
        if match is None or value is None:
            problems.append(_bad_line(path, number, line))
        else:
            values[match[1]] = value
    return values


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise Wrong("names a file that does not exist") from None
        raise Wrong("names a file that cannot be read", detail=error.strerror or "") from None
    if len(data) > MAX_BYTES:
        raise Wrong("names a file larger than 1 MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Wrong("names a file that is not UTF-8 text") from None


def _value(written: str) -> str | None:
    """What the part after ``=`` means; None when it cannot be read."""
    if "\0" in written:
        return None
    if written[:1] in ("'", '"'):
        match = _QUOTED.fullmatch(written)
        if match is None:
            return None
        return match[1] if match[1] is not None else re.sub(r"\\(.)", _escape, match[2], flags=re.DOTALL)
    return re.sub(r"(?:^|\s)#.*", "", written).rstrip()


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[1], match[1] if match[1] in '"\\$`' else match[0])


def _bad_line(path: Path, number: int, line: str) -> Problem:
    spot = Spot(str(path), number, len(line) - len(line.lstrip()) + 1)
    return spot.problem((), "must have the form NAME=VALUE", "quote a value that holds quotes; # begins a comment")
