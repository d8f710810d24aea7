"""What is said of a spec that may be run, but hardly means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.spec import Problem, doubts, load_spec


def doubted(folder: Path, text: str, **environ: str) -> tuple[Problem, ...]:
    path = folder / "job.yaml"
    path.write_text(f"name: a\n{text}\n", encoding="utf-8")
    return doubts(load_spec(path, environ=environ))


@pytest.mark.parametrize(
    ("command", "signs"),
    [
        ("python train.py > log", ">"),
        ("python train.py >log", ">"),
        ("python train.py >> log", ">>"),
        ("python train.py 2>&1", ">"),
        ("python train.py &> log", "&>"),
        ("python train.py < data", "<"),
        ("python train.py | tee log", "|"),
        ("python a.py && python b.py", "&&"),
        ("python a.py || true", "||"),
        ("python a.py; python b.py", ";"),
        ("python a.py ; python b.py", ";"),
        ("python train.py &", "&"),
        ("python train.py --lr $LR", "$"),
        ("python train.py --out $(date)", "$"),
        ("python train.py 2> $LOG | tee log", "> and $ and |"),
    ],
)
def test_what_only_a_shell_understands(tmp_path: Path, command: str, signs: str) -> None:
    (found,) = doubted(tmp_path, f"command: {command}")
    said = "would be handed to the program as it is"
    assert str(found) == f"{tmp_path}/job.yaml:2:10: command: no shell runs: {signs} {said}"
    assert "bash -c" in found.hint


@pytest.mark.parametrize(
    "text",
    [
        "command: python train.py --lr 1e-3 --name 'a b' --glob 'data/*.jpg'",
        "command: bash -c 'python train.py > log && echo $HOME'",
        "command: /bin/sh -c 'a | b'",
        "command: env A=1 bash -c 'a; b'",
        "command: python train.py --pattern 'a|b' --price '5$' --arrow '->' --url 'http://x/?a=1&b=2'",
        "command: [python, -c, 'import a; a.run()']",
        "script: |\n  python train.py > log\n  echo $HOME",
    ],
)
def test_what_is_meant_as_it_stands(tmp_path: Path, text: str) -> None:
    assert doubted(tmp_path, text) == ()


def test_no_value_of_the_environment_is_shown(tmp_path: Path) -> None:
    (found,) = doubted(tmp_path, "command: python train.py ${WHERE}", WHERE=">hunter22")
    assert "hunter22" not in str(found) + found.hint


@pytest.mark.parametrize("resume", ["--resume last.pt", "--ckpt /out/newest", "resume", "--path={step", "--n 3"])
def test_resume_without_a_place_to_resume_from(tmp_path: Path, resume: str) -> None:
    (found,) = doubted(tmp_path, f'command: sh\ncheckpoints: {{resume: "{resume}"}}')
    assert str(found).startswith(f"{tmp_path}/job.yaml:3:23: checkpoints.resume: names neither {{path}} nor {{step}}")


@pytest.mark.parametrize(
    "resume", ["--resume {path}", "--step={step}", "--resume", "--resume --strict", "--resume latest", "resume=True"]
)
def test_resume_that_makes_sense(tmp_path: Path, resume: str) -> None:
    assert doubted(tmp_path, f'command: sh\ncheckpoints: {{resume: "{resume}"}}') == ()


def test_a_price_that_is_compared_with_nothing(tmp_path: Path) -> None:
    (found,) = doubted(tmp_path, "command: sh\nprice: {on_demand_per_hour: 3}")
    assert str(found).startswith(f"{tmp_path}/job.yaml:3:29: price.on_demand_per_hour: does nothing without")
    assert doubted(tmp_path, "command: sh\nprice: {on_demand_per_hour: 3, per_hour: 1}") == ()
