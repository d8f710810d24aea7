"""``cloudrun init`` writes a spec that works for the script that is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runner.cli.main import cloudrun
from runner.cli.spec import resume_arguments
from runner.errors import UsageError
from runner.spec import JobSpec, SpecInvalid, load_spec, not_yet, unmet_needs


def init(*arguments: str) -> Result:
    return CliRunner().invoke(cloudrun, ["init", *arguments])


def made(folder: Path, *arguments: str) -> tuple[JobSpec, str]:
    """The spec that init wrote; it must be one that runs."""
    result = init(str(folder), *arguments)
    assert result.exception is None, result.exception
    spec = load_spec(folder / "job.yaml", environ=os.environ)
    assert unmet_needs(spec, os.environ) == ()
    assert not_yet(spec) == ()
    return spec, result.output


def folder_with(parent: Path, name: str, **scripts: str) -> Path:
    folder = parent / name
    folder.mkdir()
    for script, text in scripts.items():
        (folder / f"{script}.py").write_text(text, encoding="utf-8")
    return folder


MAIN = 'if __name__ == "__main__":\n    pass\n'


@pytest.mark.parametrize(
    ("scripts", "chosen"),
    [
        ({"train": "", "main": "", "other": MAIN}, "train.py"),
        ({"main": "", "other": MAIN}, "main.py"),
        ({"other": MAIN, "train_net": ""}, "train_net.py"),
        ({"model": "", "run": MAIN, "test_run": MAIN, "setup": MAIN}, "run.py"),
        ({"zoo": MAIN, "alpha": MAIN}, "alpha.py"),
        ({"lonely": ""}, "lonely.py"),
    ],
)
def test_which_script_is_chosen(tmp_path: Path, scripts: dict[str, str], chosen: str) -> None:
    spec, _ = made(folder_with(tmp_path, "job", **scripts))
    assert spec.argv is not None
    assert spec.argv[1:] == (chosen,)


def test_the_choice_is_told(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "My Job", zoo=MAIN, alpha=MAIN, model="")
    spec, output = made(folder)
    assert spec.name == "my-job"
    assert "there are several scripts: alpha.py, zoo.py" in output
    assert "alpha.py (it is meant to be run)" in output
    assert "next: cloudrun validate" in output
    assert "then: cloudrun submit" in output


@pytest.mark.parametrize(
    ("text", "resume"),
    [
        ('p.add_argument("--resume", default=None)', "--resume {path}"),
        ("p.add_argument('--resume', action='store_true')", "--resume"),
        ('p.add_argument("--resume")\np.add_argument("--resume_from_checkpoint")', "--resume_from_checkpoint {path}"),
        ('p.add_argument("--ckpt_path", type=str)', "--ckpt_path {path}"),
        ('p.add_argument("--resumes")', ""),
        ("# --resume", ""),
    ],
)
def test_how_the_script_resumes(tmp_path: Path, text: str, resume: str) -> None:
    assert resume_arguments(text) == resume
    spec, _ = made(folder_with(tmp_path, "job", train=text))
    assert " ".join(spec.checkpoints.resume) == resume


def test_a_script_that_knows_cloudrun_needs_no_arguments(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "job", train='os.environ["CLOUDRUN_RESUME_FROM"]')
    made(folder)
    assert "# train.py reads CLOUDRUN_ variables" in (folder / "job.yaml").read_text(encoding="utf-8")


def test_nothing_is_replaced_unless_forced(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "job", train="")
    (folder / "job.yaml").write_text("mine", encoding="utf-8")
    assert isinstance(init(str(folder)).exception, UsageError)
    assert (folder / "job.yaml").read_text(encoding="utf-8") == "mine"
    assert made(folder, "--force", "--name", "yes")[0].name == "yes"


def test_a_bad_name_writes_nothing(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "job", train="")
    assert isinstance(init(str(folder), "--name", "No Name").exception, SpecInvalid)
    assert not (folder / "job.yaml").exists()


@pytest.mark.parametrize("name", ["2024", "...", "a" * 100, "-x", "Grüße", "e"])
def test_any_folder_gives_a_name(tmp_path: Path, name: str) -> None:
    made(folder_with(tmp_path, name, train=""))


@pytest.mark.parametrize(
    "name", ["train it", "train'it", 'train"it', "train${X}", "train\u00fc\U0001f600", "train#: [x"]
)
def test_any_script_name(tmp_path: Path, name: str) -> None:
    spec, _ = made(folder_with(tmp_path, "job", **{name: ""}))
    assert spec.argv is not None
    assert spec.argv[1:] == (f"{name}.py",)


def test_no_script_and_no_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert isinstance(init(str(folder)).exception, UsageError)
    assert list(tmp_path.iterdir()) == []
