"""What a spec needs from this machine and from its stores, looked at without changing anything."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.errors import ExitCode
from runner.spec.load import problem_at
from runner.spec.model import JobSpec, home_of
from runner.spec.problems import Problem

_FILE = "file://"
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*", re.ASCII)
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_NO_SCRIPT = ("-m", "-c", "--module")


def unmet_needs(spec: JobSpec, environ: Mapping[str, str]) -> tuple[Problem, ...]:
    """What is missing here: the workdir, the program, its script, bash."""
    search_path = spec.environment(environ).get("PATH", environ.get("PATH", os.defpath))
    return (*_missing_bash(spec, search_path), *_missing_program(spec, search_path), *_careless_folder(spec, environ))


def _careless_folder(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Entries of the checkpoint folder are moved and replaced: it must not hold the owner's own things."""
    folder = spec.checkpoint_dir
    precious = (spec.working_directory, spec.source.parent, home_of(environ))
    if folder is not None and any(place == folder or folder in place.parents for place in precious):
        message = "must not be, or hold, the workdir, the spec's folder or the home directory"
        yield problem_at(spec, "checkpoints.dir", message, "give the checkpoints a folder of their own")


def unmet_store_needs(spec: JobSpec, environ: Mapping[str, str]) -> tuple[Problem, ...]:
    """What is missing in the stores: data that is not there, a store that cannot be written. Only ``file://`` yet."""
    return (*_missing_sources(spec), *_unwritable_store(spec, environ))


def _missing_bash(spec: JobSpec, search_path: str) -> Iterator[Problem]:
    for key, text in (("script", spec.script), ("setup", spec.setup)):
        if text is not None and shutil.which("bash", path=search_path) is None:
            yield problem_at(spec, key, "needs bash, which is not in PATH", "install bash, or use command")


def _missing_program(spec: JobSpec, search_path: str) -> Iterator[Problem]:
    workdir = spec.working_directory
    if not os.path.isdir(workdir):
        where = _shown(spec, spec.workdir, str(workdir))
        yield problem_at(spec, "workdir", f"there is no folder {where}", "it is relative to the spec's folder")
        return
    if spec.argv is None or spec.setup is not None:
        return  # what a setup script brings is not there before it has run
    if not _is_program(spec.argv[0], workdir, search_path):
        yield problem_at(
            spec, "command", f"there is no program {_shown(spec, spec.argv[0])} here", _program_hint(spec.argv[0])
        )
    script = python_script(spec.argv)
    if script and not os.path.exists(workdir / script):
        message = f"there is no file {_shown(spec, script)} in the workdir"
        yield problem_at(spec, "command", message, "check the name and the workdir")


def _shown(spec: JobSpec, written: str, meant: str = "") -> str:
    """A value for a message; hidden when it came from the environment."""
    return (meant or written) if spec.origin.says(written) else "(named by the environment)"


def _is_program(name: str, workdir: Path, search_path: str) -> bool:
    if "/" in name:
        path = workdir / name
        return os.path.isfile(path) and os.access(path, os.X_OK)
    return shutil.which(name, path=search_path) is not None


def _program_hint(name: str) -> str:
    if "/" in name:
        return "the path is relative to the workdir, and the file must be executable"
    if _PYTHON.fullmatch(name):
        return "activate the environment first, or write python3 or a full path"
    if "=" in name:
        return "no shell runs: variables for the trainer go into env"
    return "install it, or activate its environment first; no shell runs, so aliases and builtins are unknown"


def python_script(argv: tuple[str, ...]) -> str | None:
    """The script that ``python x.py`` or ``torchrun --nproc-per-node 2 x.py`` runs; None where that is not clear."""
    program = Path(argv[0]).name
    if _PYTHON.fullmatch(program):
        return _first_argument(argv[1:])
    if program not in _LAUNCHERS or any(word in _NO_SCRIPT for word in argv):
        return None
    return next((word for word in argv[1:] if word.endswith(".py") and not word.startswith("-")), None)


def _first_argument(words: tuple[str, ...]) -> str | None:
    skip = False
    for word in words:
        if skip or word in _WITH_VALUE:
            skip = not skip
        elif word in _NO_SCRIPT or word == "-":
            return None
        elif not word.startswith("-"):
            return word
    return None


def _missing_sources(spec: JobSpec) -> Iterator[Problem]:
    for index, entry in enumerate(spec.data):
        path = Path(entry.source.removeprefix(_FILE))
        if entry.source.startswith(_FILE) and not os.access(path, os.R_OK):
            there = os.path.exists(path)
            message = f"{_shown(spec, entry.source, str(path))} {'cannot be read' if there else 'does not exist'}"
            code = ExitCode.ACCESS_DENIED if there else ExitCode.BAD_SPEC
            yield problem_at(spec, f"data.{index}.source", message, "check the path, or mount the disk", exit_code=code)


def _unwritable_store(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[Problem]:
    url = spec.store_url(environ)
    folder = Path(url.removeprefix(_FILE))
    if url.startswith(_FILE) and not can_be_written(folder):
        is_folder = os.path.isdir(nearest(folder))
        message = f"{_shown(spec, spec.store or '', str(folder))} cannot be written"
        code = ExitCode.ACCESS_DENIED if is_folder else ExitCode.STORE_UNREACHABLE
        hint = "choose a folder that you may write to" if is_folder else "a store is a folder; give another path"
        yield problem_at(spec, "store", message, hint, exit_code=code)


def can_be_written(folder: Path) -> bool:
    """True where the folder is writable, or could be made. Nothing is made."""
    there = nearest(folder)
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def nearest(folder: Path) -> Path:
    """The folder itself, or what of the way to it exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))
