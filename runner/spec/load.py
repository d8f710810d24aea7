"""From a file, ``--set`` overrides and the environment to a JobSpec, or to all that is wrong with it at once."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from runner.errors import ExitCode, UsageError
from runner.spec import document
from runner.spec.document import MAX_BYTES, Loc, Node, Scalar, Spot, find, scalars, shown, to_python, value_of
from runner.spec.env_file import read_env_file
from runner.spec.interpolation import interpolate
from runner.spec.kinds import read_target
from runner.spec.known import near_word, suggestion
from runner.spec.model import JobSpec, Origin, home_of
from runner.spec.overrides import apply_overrides
from runner.spec.problems import Problem, SpecInvalid, Wrong, in_order, masked

MIN_SECRET = 4
"""Shorter secrets cannot be masked: they would hide half of every log."""

Fault = tuple[Loc, Wrong]


def load_spec(path: Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str]) -> JobSpec:
    """The job that the file describes.

    Raises UsageError when there is no such file, and SpecInvalid with every problem found otherwise. No problem shows a
    value that came from the environment.
    """
    return spec_from_text(_read(path), path, overrides=overrides, environ=environ)


def spec_from_text(raw_text: str, path: Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str]) -> JobSpec:
    """Like ``load_spec`` for a text that is, or will be, the content of ``path``."""
    problems: list[Problem] = []
    tree = document.parse(raw_text, str(path), problems)
    apply_overrides(tree, overrides, problems)
    _refuse_nul(tree, problems)
    digest = _digest(tree)
    filled = interpolate(tree, environ, problems)
    assert isinstance(filled, document.Mapping)
    values = to_python(filled, _keeps_text)
    assert isinstance(values, dict)
    home = home_of(environ)
    env_values = _env_file(values, filled, path, home, problems)
    secrets = _secret_texts(values, environ)
    origin = Origin(_absolute(path), raw_text, digest, home, env_values, secrets, filled, tuple(overrides))
    spec = _validated(values, filled, origin, environ, problems)
    if problems or spec is None:
        raise SpecInvalid(masked(problem, secrets) for problem in in_order(problems, str(path)))
    return spec


def problem_at(
    spec: JobSpec, key: str, message: str, hint: str = "", *, exit_code: ExitCode = ExitCode.BAD_SPEC
) -> Problem:
    """A problem with the value of ``key`` (a dotted path), at its place in the file the spec came from.

    Secret values in it are masked.
    """
    loc = tuple(int(part) if part.isdecimal() else part for part in key.split(".")) if key else ()
    _, spot, _, _ = find(spec.origin.tree, loc)
    return masked(replace(spot.problem(loc, message, hint), exit_code=exit_code), spec.origin.secrets)


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(
            f"there is no job spec {path}", "give the path of a YAML file, or write one: cloudrun init"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path}: {why}", "give the path of a YAML file that this user may read") from None
    start = Spot(str(path), 1, 1)
    if len(data) > MAX_BYTES:
        raise SpecInvalid([start.problem((), "is larger than 1 MiB", "is this really a job spec?")])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        spot = Spot(str(path), 1 + before.count("\n"), len(before) - before.rfind("\n"))
        raise SpecInvalid([spot.problem((), "is not UTF-8 text", "save the file as UTF-8")]) from None


def _keeps_text(loc: Loc) -> bool:
    """True where a number or a boolean is text all the same: ``env: {DEBUG: 1}``, ``command: [python, x.py, 3]``."""
    return (
        (len(loc) == 2 and loc[0] in ("env", "command"))
        or (len(loc) == 3 and loc[:2] == ("checkpoints", "resume"))
        or (len(loc) == 4 and loc[0] == "notify" and loc[2] == "command")
    )


def _refuse_nul(tree: Node, problems: list[Problem]) -> None:
    for loc, scalar in scalars(tree):
        if "\0" in scalar.text:
            problems.append(scalar.spot.problem(loc, "must not hold a NUL character"))


def _digest(tree: Node) -> str:
    values = to_python(tree, _keeps_text)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _secret_texts(values: Mapping[str, Any], environ: Mapping[str, str]) -> frozenset[str]:
    named = values.get("secrets")
    names = (named,) if isinstance(named, str) else named if isinstance(named, tuple) else ()
    found = {environ.get(name, "") for name in names if isinstance(name, str)}
    return frozenset(text for text in found if len(text) >= MIN_SECRET)


def _env_file(values: Mapping[str, Any], tree: Node, path: Path, home: Path, problems: list[Problem]) -> dict[str, str]:
    named = values.get("env_file")
    if not isinstance(named, str) or not named.strip() or _is_failed(tree, ("env_file",)):
        return {}
    where = home / named[2:] if named.startswith("~/") else path.parent / named
    outside = bool(_scalars_at(tree, ("env_file",), lambda scalar: scalar.outside))
    try:
        return read_env_file(where, problems) if not outside else _read_quietly(where, tree, problems)
    except (Wrong, ValueError) as error:
        wrong = error if isinstance(error, Wrong) else Wrong("names a file that cannot be read")
        problems.append(_problem(tree, ("env_file",), wrong))
        return {}


def _read_quietly(where: Path, tree: Node, problems: list[Problem]) -> dict[str, str]:
    """Like ``read_env_file`` for a path that came from the environment: no problem shows the path."""
    found: list[Problem] = []
    values = read_env_file(where, found)
    lines = ", ".join(str(problem.line) for problem in found[:20])
    if found:
        wrong = Wrong(f"names a file with bad lines: {lines}", found[0].hint, echo=False)
        problems.append(_problem(tree, ("env_file",), wrong))
    return values


def _validated(
    values: dict[str, Any], tree: Node, origin: Origin, environ: Mapping[str, str], problems: list[Problem]
) -> JobSpec | None:
    spec = None
    faults = list(_faults_between(values, environ))
    try:
        spec = JobSpec.of(values, origin)
    except ValidationError as error:
        faults += [_fault(detail) for detail in error.errors(include_url=False)]
    problems += [_problem(tree, loc, wrong) for loc, wrong in faults if not _is_failed(tree, loc)]
    return spec


def _scalars_at(tree: Node, loc: Loc, wanted: Any) -> list[Scalar]:
    _, _, node, _ = find(tree, loc)
    return [scalar for _, scalar in scalars(node) if wanted(scalar)]


def _is_failed(tree: Node, loc: Loc) -> bool:
    """True where a problem is known already, so that what follows from it is no news."""
    _, _, node, found = find(tree, loc)
    return isinstance(node, Scalar) and node.failed and (found or bool(loc))


def _problem(tree: Node, loc: Loc, wrong: Wrong) -> Problem:
    """The fault at its place. What came from the environment is not shown."""
    is_key = loc[-1:] == ("[key]",)
    way = loc[:-1] if is_key else (*loc, *wrong.at)
    key_spot, spot, node, found = find(tree, way)
    at_key = is_key or wrong.message.startswith("unknown key") or (isinstance(node, Scalar) and value_of(node) is None)
    return (key_spot if found and at_key else spot).problem(way, _worded(wrong, node, found and not is_key), wrong.hint)


def _worded(wrong: Wrong, node: Node, found: bool) -> str:
    outside = any(scalar.outside for _, scalar in scalars(node))
    message = wrong.message
    if wrong.detail and not outside:
        message = f"{message} ({shown(wrong.detail, 100)})"
    if not wrong.echo or not found or not isinstance(node, Scalar) or not node.text:
        return message
    return f"{message}, not {'the value from the environment' if outside else _quoted(node.text)}"


def _quoted(text: str) -> str:
    return f"'{shown(text)}'"


def _fault(detail: ErrorDetails) -> Fault:
    """What pydantic found, in our words."""
    loc, context, kind = detail["loc"], detail.get("ctx", {}), detail["type"]
    if kind == "value_error" and isinstance(context.get("error"), Wrong):
        return loc, context["error"]
    if kind == "extra_forbidden":
        return loc, Wrong(*suggestion(loc), echo=False)
    if kind == "missing":
        return loc, Wrong("is required", _REQUIRED_HINTS.get(str(loc[-1]), ""), echo=False)
    if kind == "literal_error":
        return loc, _not_one_of(context["expected"], detail["input"])
    if kind in _BOUNDS:
        return loc, Wrong(f"{_BOUNDS[kind]} {next(iter(context.values())):g}")
    return loc, Wrong(_MESSAGES.get(kind, detail["msg"]))


_REQUIRED_HINTS = {
    "name": "name the job, such as `name: digits`",
    "source": "say where the data lies, such as `source: s3://bucket/prefix`",
}
_BOUNDS = {"greater_than_equal": "must be at least", "less_than_equal": "must be at most"}
_MESSAGES = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
}


def _not_one_of(expected: str, given: object) -> Wrong:
    words = re.findall(r"'([^']*)'|(\d+)", expected)
    known = [text or number for text, number in words]
    if len(known) == 1:
        return Wrong(f"must be {known[0]}")
    near = near_word(given, known) if isinstance(given, str) else ""
    return Wrong(f"must be one of {', '.join(known)}", f"did you mean {near}?" if near else "")


def _faults_between(values: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Fault]:
    """Rules about several keys, or about a key and the environment. They hold whatever else is wrong."""
    yield from _one_program(values)
    yield from _separate_targets(values)
    yield from _one_way_each(values)
    yield from _present_secrets(values, environ)


def _one_program(values: Mapping[str, Any]) -> Iterator[Fault]:
    given = [key for key in ("command", "script") if values.get(key) is not None]
    if len(given) == 2:
        yield ("script",), Wrong("cannot stand beside command", "keep one of the two", echo=False)
    if not given:
        hint = "say what to run, such as `command: python train.py`"
        yield ("command",), Wrong("is required, or script", hint, echo=False)


def _items(values: Mapping[str, Any], key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    listed = values.get(key)
    for index, item in enumerate(listed if isinstance(listed, tuple) else ()):
        if isinstance(item, dict):
            yield index, item


def _separate_targets(values: Mapping[str, Any]) -> Iterator[Fault]:
    taken: dict[str, int] = {}
    for index, item in _items(values, "data"):
        try:
            target = read_target(item.get("target") or "")
        except Wrong:
            continue
        clash = next((taken[other] for other in taken if _overlap(target, other)), None)
        if clash is None:
            taken[target] = index
        else:
            wrong = Wrong(f"lies in the same folder as data.{clash}", "give each a target of its own", echo=False)
            yield ("data", index, "target"), wrong


def _overlap(one: str, other: str) -> bool:
    if not one or not other:
        return True
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _one_way_each(values: Mapping[str, Any]) -> Iterator[Fault]:
    for index, item in _items(values, "notify"):
        if (item.get("url") is None) == (item.get("command") is None):
            yield ("notify", index), Wrong("needs exactly one of url and command", echo=False)


def _present_secrets(values: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Fault]:
    named = values.get("secrets")
    listed = named if isinstance(named, tuple) else (named,)
    for index, name in enumerate(listed):
        loc: Loc = ("secrets", index) if isinstance(named, tuple) else ("secrets",)
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            continue
        value = environ.get(name, "")
        if not value:
            yield (
                loc,
                Wrong("is not set in the environment", "export it before cloudrun starts", detail=name, echo=False),
            )
        elif len(value) < MIN_SECRET:
            hint = f"a secret needs at least {MIN_SECRET} characters; pass other values by env"
            yield loc, Wrong("has a value too short to be masked safely", hint, detail=name, echo=False)
