"""What a spec needs from the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.errors import ExitCode
from runner.spec import load_spec, unmet_needs, unmet_store_needs
from runner.spec.needs import python_script


def unmet(folder: Path, text: str, *, online: bool = False, **environ: str) -> list[str]:
    path = folder / "job.yaml"
    path.write_text(f"name: a\n{text}\n", encoding="utf-8")
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), **environ}
    look = unmet_store_needs if online else unmet_needs
    return [str(problem).removeprefix(f"{path}:") for problem in look(load_spec(path, environ=environ), environ)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("command: sh -c true", []),
        ("command: ./run.sh", []),
        ("command: nope-nope x", ["2:10: command: there is no program nope-nope here"]),
        ("command: ./plain.txt", ["2:10: command: there is no program ./plain.txt here"]),
        ("command: sh\nworkdir: nowhere", ["3:10: workdir: there is no folder {folder}/nowhere"]),
        ("command: sh\nworkdir: plain.txt", ["3:10: workdir: there is no folder {folder}/plain.txt"]),
        ("command: python3 here.py", []),
        ("command: python3 -u -X dev there.py", ["2:10: command: there is no file there.py in the workdir"]),
        ("command: python3 -m there.py", []),
        ("script: echo", []),
        ("script: echo\nenv: {PATH: /nowhere}", ["2:9: script: needs bash, which is not in PATH"]),
        ("command: sh\nenv: {PATH: /nowhere}", ["2:10: command: there is no program sh here"]),
        ("command: sh\nworkdir: '${LONG}'", ["3:10: workdir: there is no folder (named by the environment)"]),
    ],
)
def test_needs(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "here.py").touch()
    (tmp_path / "plain.txt").touch()
    (tmp_path / "run.sh").touch(mode=0o755)
    assert unmet(tmp_path, text, LONG="x" * 300) == [line.format(folder=tmp_path) for line in expected]


def test_a_program_from_the_environment_is_not_shown(tmp_path: Path) -> None:
    assert unmet(tmp_path, "command: ${TOOL} x", TOOL="hunter22") == [
        "2:10: command: there is no program (named by the environment) here"
    ]


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (("python", "a.py", "b.py"), "a.py"),
        (("/usr/bin/python3.11", "-u", "a.py"), "a.py"),
        (("python", "-W", "ignore", "a.py"), "a.py"),
        (("python", "-m", "a"), None),
        (("python", "-c", "1"), None),
        (("python",), None),
        (("torchrun", "--nproc-per-node", "2", "a.py", "--x"), "a.py"),
        (("torchrun", "-m", "a.py"), None),
        (("accelerate", "launch", "a.py"), "a.py"),
        (("bash", "a.py"), None),
    ],
)
def test_which_script_a_command_runs(argv: tuple[str, ...], script: str | None) -> None:
    assert python_script(argv) == script


def test_stores_and_sources(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "file").touch()
    data = f"command: sh\ndata: [{{source: 'file://{tmp_path}/data'}}]"
    before = sorted(tmp_path.rglob("*"))
    assert unmet(tmp_path, f"{data}\nstore: file://{tmp_path}/new/store", online=True) == []
    assert unmet(tmp_path, data, online=True) == []
    assert unmet(tmp_path, f"command: sh\nstore: file://{tmp_path}/file/x", online=True) == [
        f"3:8: store: {tmp_path}/file/x cannot be written"
    ]
    assert unmet(tmp_path, f"command: sh\ndata: [{{source: 'file://{tmp_path}/none'}}]", online=True) == [
        f"3:17: data.0.source: {tmp_path}/none does not exist"
    ]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "job.yaml"])


def test_each_need_has_the_exit_code_of_submit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = f"command: sh\nstore: file://{tmp_path}/file/x\ndata: [{{source: 'file://{tmp_path}/none'}}]"
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\n{text}\n")
    found = {problem.key: problem for problem in unmet_store_needs(load_spec(path, environ={}), {})}
    assert found["store"].exit_code == ExitCode.STORE_UNREACHABLE
    assert found["store"].hint == "a store is a folder; give another path"
    assert found["data.0.source"].exit_code == ExitCode.BAD_SPEC


def test_variables_before_a_program_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ncommand: A=1 python train.py\n")
    (found,) = unmet_needs(load_spec(path, environ={}), {"PATH": os.environ["PATH"]})
    assert found.hint == "no shell runs: variables for the trainer go into env"


@pytest.mark.root
def test_a_store_on_a_disk_that_may_not_be_written(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\ncommand: sh\nstore: file://{mount('ro')}/x\n")
    (found,) = unmet_store_needs(load_spec(path, environ={}), {})
    assert (found.exit_code, found.hint) == (ExitCode.ACCESS_DENIED, "choose a folder that you may write to")


@pytest.mark.parametrize("folder", [".", "..", "/", "../.."])
def test_a_checkpoint_folder_must_not_hold_the_owners_own_things(tmp_path: Path, folder: str) -> None:
    """What lies in it is moved aside and replaced."""
    home = tmp_path / "home"
    (found,) = unmet(tmp_path, f"command: sh\ncheckpoints: {{dir: {folder}}}", HOME=str(home))
    assert "must not be, or hold, the workdir" in found
    assert unmet(tmp_path, "command: sh\ncheckpoints: {dir: out}", HOME=str(home)) == []
