"""What a spec may say and hardly means: warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from runner.spec.kinds import PLACEHOLDERS
from runner.spec.load import problem_at
from runner.spec.model import JobSpec
from runner.spec.problems import Problem

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
_OPERATOR = re.compile(r"(\|\|?|&&?|;)|[0-9]?(>>?|<)(?:&[0-9]|[^>(].*)?|(&>>?).*")
_SEPARATOR = re.compile(r"[^;]+(;)")
_VARIABLE = re.compile(r"\$[A-Za-z_(]")
_FINDS_IT_ITSELF = ("true", "auto", "last", "latest")


def doubts(spec: JobSpec) -> tuple[Problem, ...]:
    """Everything that this version takes as it is written, though it was probably meant otherwise."""
    return (*_meant_for_a_shell(spec), *_resumes_from_nothing(spec), *_price_without_use(spec))


def _meant_for_a_shell(spec: JobSpec) -> Iterator[Problem]:
    argv = spec.argv or ()
    if any(Path(word).name in _SHELLS for word in argv):
        return
    signs = dict.fromkeys(sign for word in argv if (sign := _shell_sign(word)))
    if signs:
        message = f"no shell runs: {' and '.join(signs)} would be handed to the program as it is"
        yield problem_at(spec, "command", message, "write a script, which bash runs, or: command: bash -c '...'")


def _shell_sign(word: str) -> str:
    """What only a shell understands in this word of a command; empty when nothing."""
    found = _OPERATOR.fullmatch(word) or _SEPARATOR.fullmatch(word)
    if found:
        return next(sign for sign in found.groups() if sign)
    return "$" if _VARIABLE.search(word) else ""


def _resumes_from_nothing(spec: JobSpec) -> Iterator[Problem]:
    words = spec.checkpoints.resume
    named = any(placeholder in word for word in words for placeholder in PLACEHOLDERS)
    if words and not named and not all(map(_needs_no_path, words)):
        message = "names neither {path} nor {step}: the same words are appended whatever there is to resume"
        yield problem_at(spec, "checkpoints.resume", message, 'such as "--resume {path}"')


def _needs_no_path(word: str) -> bool:
    """A switch, or the word for "find it yourself"."""
    name, _, value = word.rpartition("=")
    return value.lower() in _FINDS_IT_ITSELF or (not name and word.startswith("-"))


def _price_without_use(spec: JobSpec) -> Iterator[Problem]:
    if spec.price.on_demand_per_hour is not None and spec.price.per_hour is None:
        message = "does nothing without price.per_hour beside it: what is saved is the difference"
        yield problem_at(spec, "price.on_demand_per_hour", message, "give both, or none")
