"""What is wrong with a spec: where, what, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from runner.errors import CloudrunError, ExitCode

MASK = "***"


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault, or one warning, at one place. ``line`` and ``column`` start at 1.

    ``key`` is the dotted path, empty when the whole file is meant. In a ``--set`` override ``file`` is ``--set``,
    ``line`` says which override and ``column`` where in its text. ``exit_code`` is what a command that meets it leaves
    with.
    """

    file: str
    line: int
    column: int
    key: str
    message: str
    hint: str = ""
    exit_code: ExitCode = ExitCode.BAD_SPEC

    def __str__(self) -> str:
        what = f"{self.key}: {self.message}" if self.key else self.message
        return f"{self.file}:{self.line}:{self.column}: {what}"


class SpecInvalid(CloudrunError):
    """A job spec that cannot be run. ``problems`` is never empty and sorted by place; the message has one a line."""

    exit_code = ExitCode.BAD_SPEC

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        hints = dict.fromkeys(problem.hint for problem in self.problems if problem.hint)
        super().__init__("\n".join(map(str, self.problems)), "; ".join(hints))


class Wrong(ValueError):
    """Why one value is refused, said without the value: it may be a secret, and the caller knows whether.

    The message goes on from the key, as in "must be a number". ``detail`` may hold parts of the value and is shown only
    where that is safe; ``echo`` asks for the value itself on the same terms. ``at`` leads from the value to the part of
    it that is meant.
    """

    def __init__(
        self, message: str, hint: str = "", *, detail: str = "", at: tuple[str | int, ...] = (), echo: bool = True
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail
        self.at = at
        self.echo = echo


def in_order(problems: Iterable[Problem], main_file: str) -> list[Problem]:
    """Sorted as a reader goes through: the spec first, by line; then other files. No problem twice."""
    return sorted(dict.fromkeys(problems), key=lambda it: (it.file != main_file, it.file, it.line, it.column, it.key))


def masked(problem: Problem, secrets: Iterable[str]) -> Problem:
    """The problem with every secret value masked, whatever path it took into the text."""
    clean = {name: _mask(str(getattr(problem, name)), secrets) for name in ("file", "key", "message", "hint")}
    return replace(problem, **clean)  # type: ignore[arg-type]  # mypy cannot see which fields the names are


def _mask(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return MASK if any(secret and secret in text for secret in secrets) else text
