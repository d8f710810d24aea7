"""Values from the environment: filled in, never read as YAML, never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.spec import JobSpec, SpecInvalid, load_spec

OK = "name: a\ncommand: b\n"
ENVIRON = {"SET": "value", "EMPTY": "", "N": "7", "YAML": "[a, b]: {c", "YES": "yes", "AGAIN": "${SET}"}


def load(folder: Path, text: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path, environ=ENVIRON)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${SET}", "value"),
        ("a${SET}b${SET}c", "avaluebvaluec"),
        ("${EMPTY}x", "x"),
        ("${NOPE:-default}", "default"),
        ("${EMPTY:-default}", "default"),
        ("${SET:-default}", "value"),
        ("${NOPE:-}x", "x"),
        ("${SET:?needed}", "value"),
        ("$${SET}", "${SET}"),
        ("$${SET} ${SET}", "${SET} value"),
        ("$SET $ {SET}", "$SET $ {SET}"),
        ("${AGAIN}", "${SET}"),
        ("${YAML}", "[a, b]: {c"),
        ("'${SET}'", "value"),
    ],
)
def test_forms(tmp_path: Path, written: str, value: str) -> None:
    assert load(tmp_path, f"{OK}env:\n  A: {written}\n").env == {"A": value}


def test_an_unquoted_value_has_the_type_it_looks_like(tmp_path: Path) -> None:
    spec = load(tmp_path, f"{OK}restart:\n  max_without_progress: ${{N}}\n")
    assert spec.restart.max_without_progress == 7
    spec = load(tmp_path, f"{OK}stop: {{grace: '${{N}}s'}}\ncheckpoints:\n  inject: ${{YES}}\n  every: ${{EVERY:-10m}}")
    assert (spec.stop.grace, spec.checkpoints.inject, spec.checkpoints.every) == (7.0, True, 600.0)


def test_a_quoted_value_stays_text(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match="must be a whole number, not the value from the environment"):
        load(tmp_path, f'{OK}restart: {{max_without_progress: "${{N}}"}}')


def test_keys_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"env\.\$\{SET\}: must be the name"):
        load(tmp_path, f'{OK}env: {{"${{SET}}": x}}')


def test_scripts_belong_to_bash(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: a\nscript: echo ${i} $${SET}\nsetup: echo ${NOPE:?no}\n")
    assert (spec.script, spec.setup) == ("echo ${i} $${SET}", "echo ${NOPE:?no}")


@pytest.mark.parametrize(
    ("written", "message", "hint"),
    [
        (
            "${NOPE}",
            "${NOPE} is not set in the environment",
            "set it first: export NOPE=..., or give a default: ${NOPE:-default}",
        ),
        ("${NOPE:?the run}", "${NOPE} is not set: the run", "set it first: export NOPE=..."),
        ("${EMPTY:?the run}", "${EMPTY} is not set: the run", "set it first: export EMPTY=..."),
        ("${NOPE:?}", "${NOPE} is not set: is required", "set it first: export NOPE=..."),
        ("${1x}", "a ${ that is no reference", None),
        ("${A", "a ${ that is no reference", None),
        ("${SET:+x}", "a ${ that is no reference", None),
        ("${}", "a ${ that is no reference", None),
    ],
)
def test_what_cannot_be_filled(tmp_path: Path, written: str, message: str, hint: str | None) -> None:
    with pytest.raises(SpecInvalid) as caught:
        load(tmp_path, f"{OK}store: '{written}'\n")
    assert [problem.message for problem in caught.value.problems] == [message]
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (3, 8)
    assert hint is None or caught.value.problems[0].hint == hint


def test_a_reference_inside_a_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match="no reference"):
        load(tmp_path, f"{OK}workdir: ${{NOPE:-${{SET}}}}")


@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_no_value_becomes_structure(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    path = tmp_path_factory.getbasetemp() / "structure.yaml"
    path.write_text(f"{OK}env:\n  A: ${{X:-}}-\n  B: '${{X}}'\n  C: z\n", encoding="utf-8")
    assert load_spec(path, environ={"X": value}).env == {"A": f"{value}-", "B": value, "C": "z"}


def test_a_reference_inside_braces_needs_quotes_and_the_hint_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid) as caught:
        load(tmp_path, f"{OK}stop: {{grace: ${{SET}}}}")
    assert caught.value.hint == "inside {...} and [...] a ${NAME} needs quotes, or a line of its own"
