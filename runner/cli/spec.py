"""Commands about the job spec: ``validate``, ``schema`` and ``init``."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from runner.cli.main import HELP
from runner.errors import ExitCode, UsageError
from runner.files import write_atomically
from runner.spec import (
    JobSpec,
    Problem,
    SpecInvalid,
    doubts,
    load_spec,
    not_yet,
    spec_from_text,
    unmet_needs,
)
from runner.spec import schema as job_schema

# Every option by which common training scripts take a checkpoint, the most telling first.
RESUME_OPTIONS = (
    "--resume_from_checkpoint",
    "--resume-from-checkpoint",
    "--ckpt_path",
    "--ckpt-path",
    "--resume_from",
    "--resume-from",
    "--resume",
    "--load_checkpoint",
    "--load-checkpoint",
    "--restore",
)
NO_TRAINERS = ("setup.py", "conftest.py", "noxfile.py", "manage.py", "__init__.py")


@click.command(context_settings=HELP, epilog="Example: cloudrun validate job.yaml --set restart.backoff.first=1s")
@click.argument("spec_path", metavar="JOB.YAML", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Put a value over the file's; repeatable.")
@click.option("--online", is_flag=True, help="Look into the stores too: is the data there, can the store be written.")
@click.option("--json", "as_json", is_flag=True, help="Print {valid, errors, warnings} as JSON, and nothing else.")
def validate(spec_path: Path, overrides: Sequence[str], *, online: bool, as_json: bool) -> None:
    """Check a job spec and what it needs on this machine.

    All problems are reported at once. The exit code is 0, or what submit would leave with: 78 for a bad spec, with
    --online also 69 (a store does not answer) and 77 (access denied).
    """
    try:
        spec = load_spec(spec_path, overrides=overrides, environ=os.environ)
        errors = (*unmet_needs(spec, os.environ), *(_unmet_online(spec) if online else ()))
        warnings: tuple[Problem, ...] = (*doubts(spec), *not_yet(spec))
    except SpecInvalid as invalid:
        spec, errors, warnings = None, invalid.problems, ()
    except UsageError as error:
        if not as_json:
            raise
        _print_json({"valid": False, "errors": [_without_place(spec_path, error)], "warnings": []})
        raise click.exceptions.Exit(error.exit_code) from None
    if as_json:
        _print_json(
            {"valid": not errors, "errors": list(map(asdict, errors)), "warnings": list(map(_harmless, warnings))}
        )
    else:
        _print_verdict(spec_path, spec, errors, warnings)
    raise click.exceptions.Exit(errors[0].exit_code if errors else ExitCode.SUCCEEDED)


def _unmet_online(spec: JobSpec) -> Iterator[Problem]:
    from runner.cli.stores import unmet_in_stores  # noqa: PLC0415 - brings the clients of all stores along

    yield from unmet_in_stores(spec, os.environ)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def _harmless(warning: Problem) -> dict[str, Any]:
    return {name: value for name, value in asdict(warning).items() if name != "exit_code"}


def _without_place(spec_path: Path, error: UsageError) -> dict[str, Any]:
    place = {"file": str(spec_path), "line": None, "column": None, "key": ""}
    return {**place, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def _print_verdict(
    spec_path: Path, spec: JobSpec | None, errors: Iterable[Problem], warnings: Iterable[Problem]
) -> None:
    _print_problems("warning", warnings)
    _print_problems("error", errors)
    if spec is not None and not errors:
        program = shlex.join(spec.argv) if spec.argv else "a bash script"
        click.echo(f"{spec_path} is valid: {spec.name}, {program}")


def _print_problems(word: str, problems: Iterable[Problem]) -> None:
    for problem in problems:
        click.echo(f"{word}: {problem}", err=True)
        if problem.hint:
            click.echo(f"hint: {problem.hint}", err=True)


@click.command(context_settings=HELP, epilog="Example: cloudrun schema > job.schema.json")
def schema() -> None:
    """Print the JSON Schema of the job spec, for editors.

    In VS Code, begin a spec with: # yaml-language-server: $schema=job.schema.json
    """
    _print_json(job_schema())


@dataclass(frozen=True, slots=True)
class Trainer:
    """A training script and what its text tells about it."""

    path: Path
    why: str
    resume: str
    reads_variables: bool


@click.command(context_settings=HELP, epilog="Example: cloudrun init && cloudrun validate job.yaml")
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a job.yaml that is there.")
@click.option("--name", help="Name of the job; otherwise that of the folder.")
def init(folder: Path, *, force: bool, name: str | None) -> None:
    """Write a job.yaml for the training script that is here."""
    target = folder / "job.yaml"
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if os.path.lexists(target) and not force:
        raise UsageError(f"{target} exists", "add --force to replace it")
    candidates = find_trainers(folder)
    trainer = look_at(candidates[0])
    text = job_text(trainer, name or name_from(folder))
    spec_from_text(text, target, environ=os.environ)
    _write(target, text)
    _say_what_next(target, trainer, candidates)


def _write(target: Path, text: str) -> None:
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None


def find_trainers(folder: Path) -> list[Path]:
    """The scripts that may be the trainer, the likeliest first: train.py, main.py, train*.py, then those that are meant
    to be run, then the rest; by name within each. Raises UsageError when there is none.
    """
    found = [path for path in folder.glob("*.py") if path.is_file() and _may_train(path.name)]
    ranked = sorted((_rank(path), path.name, path) for path in found)
    if not ranked:
        raise UsageError(
            f"there is no Python script in {folder}", "write a job.yaml by hand: name and command are enough"
        )
    runnable = [path for rank, _, path in ranked if rank < 4]
    return runnable or [path for _, _, path in ranked]


def _may_train(name: str) -> bool:
    return name not in NO_TRAINERS and not name.startswith(("test_", "-", ".")) and name.isprintable()


def _rank(path: Path) -> int:
    if path.name in ("train.py", "main.py"):
        return ("train.py", "main.py").index(path.name)
    if path.name.startswith("train"):
        return 2
    return 3 if "__main__" in _text_of(path) else 4


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def look_at(path: Path) -> Trainer:
    text = _text_of(path)
    why = (
        "found by its name" if _rank(path) < 3 else "it is meant to be run" if _rank(path) == 3 else "the first by name"
    )
    return Trainer(path, why, resume_arguments(text), "CLOUDRUN_" in text)


def resume_arguments(text: str) -> str:
    """What to append to resume, read off the options that the script defines; empty when it defines none."""
    for option in RESUME_OPTIONS:
        match = re.search(rf"""["']{re.escape(option)}["'][^)]*""", text)
        if match:
            return option if "store_true" in match[0] else f"{option} {{path}}"
    return ""


def name_from(folder: Path) -> str:
    """A job name made of the folder's."""
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).lstrip("._-")
    return name[:63].rstrip("._-") or "job"


def job_text(trainer: Trainer, name: str) -> str:
    """A small spec with comments. Texts are JSON strings, which YAML reads as they are."""
    python = next((word for word in ("python", "python3") if shutil.which(word)), "python")
    # Our own marks must come through: the name of the script may hold ${.
    command = shlex.join([python, trainer.path.name]).replace("${", "$${")
    lines = [
        "# A job for cloudrun. Check it: cloudrun validate job.yaml",
        "# Every other key has a default; `cloudrun schema` tells them all.",
        f"name: {_plain_or_quoted(name)}",
        f"command: {_plain_or_quoted(command)}",
        "",
        *_resume_lines(trainer),
        "",
        "# Where checkpoints and logs go, so that another machine can go on. Without it they stay on this one.",
        "# store: file:///mnt/shared/jobs",
    ]
    return "\n".join(lines) + "\n"


def _plain_or_quoted(text: str) -> str:
    plain = re.fullmatch(r"[a-z][a-z0-9._ -]*[a-z0-9]", text) and text not in (
        "yes",
        "no",
        "on",
        "off",
        "true",
        "false",
    )
    return text if plain and text != "null" else json.dumps(text, ensure_ascii=False)


def _resume_lines(trainer: Trainer) -> list[str]:
    if trainer.resume:
        return [
            "checkpoints:",
            "  # Appended to the command when there is a checkpoint to go on from.",
            f"  resume: {json.dumps(trainer.resume)}",
        ]
    if trainer.reads_variables:
        return [f"# {trainer.path.name} reads CLOUDRUN_ variables: it is told where to save and what to load."]
    return [
        "# How the script is told to go on from a checkpoint; it should save into $CLOUDRUN_CHECKPOINT_DIR.",
        "# checkpoints:",
        '#   resume: "--resume {path}"',
    ]


def _say_what_next(target: Path, trainer: Trainer, candidates: Sequence[Path]) -> None:
    if len(candidates) > 1:
        click.echo(f"there are several scripts: {', '.join(path.name for path in candidates)}")
    click.echo(f"wrote {target} for {trainer.path.name} ({trainer.why})")
    if not trainer.resume and not trainer.reads_variables:
        click.echo("the script seems to take no checkpoint: see the comments in the file")
    where = shlex.quote(str(target))
    click.echo(f"next: cloudrun validate {where}\nthen: cloudrun submit {where}")
