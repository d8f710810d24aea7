"""Texts made to do harm: refused in bounded time, with nothing but SpecInvalid, and no secret told."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import UsageError
from runner.spec import SpecInvalid, load_spec, not_yet
from runner.spec.known import known_paths

OK = "name: a\ncommand: b\n"

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)
BOMBS = {
    "a billion laughs": (LAUGHS, "grows beyond all bounds when its aliases are followed"),
    "an alias to itself": ("name: &a [*a]\n", "grows beyond all bounds when its aliases are followed"),
    "a merge with itself": ("env: &a {<<: *a}\n", "grows beyond all bounds when its aliases are followed"),
    "deep lists": ("name: " + "[" * 100_000, "nested deeper than 50"),
    "deep mappings": ("name: " + "{a: " * 10_000, "nested deeper than 50"),
    "many values": ("name: [" + "a," * 400_000 + "]", "more than 10000 values"),
    "long aliased text": ("a: &a '" + "x" * 900_000 + "'\nb: [" + "*a," * 1000 + "]", "grows beyond all bounds"),
    "long references": (OK + "env: {A: '" + "${X}" * 100_000 + "'}", "grows beyond all bounds when its references"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_quickly(tmp_path: Path, name: str) -> None:
    text, message = BOMBS[name]
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    start = time.monotonic()
    with pytest.raises(SpecInvalid, match=message):
        load_spec(path, environ={"X": "y" * 1000})
    assert time.monotonic() - start < 5


def test_long_numbers_are_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{OK}restart: {{max_without_progress: {'9' * 5000}}}", encoding="utf-8")
    with pytest.raises(SpecInvalid, match="must be a whole number"):
        load_spec(path, environ={})


def told(invalid: SpecInvalid) -> str:
    assert invalid.problems
    assert all(problem.line >= 1 and problem.column >= 1 for problem in invalid.problems)
    return f"{invalid.message}{invalid.hint}{invalid.problems!r}"


def survive(path: Path, text: str, environ: dict[str, str], overrides: tuple[str, ...] = ()) -> str:
    """All that is said about the spec; any other exception than the two that are promised fails the test."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        spec = load_spec(path, overrides=overrides, environ=environ)
    except SpecInvalid as invalid:
        return told(invalid)
    except UsageError as error:
        return error.message
    return f"{spec!r}{not_yet(spec)!r}"


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["10m", "auto", "none", "5GB", "30 %", "s3://bucket/x", "file:///x", "${X}", "${Y:-1}", "TERM", "("]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(sorted({path[-1] for path in known_paths()})) | st.text(max_size=4), inner, max_size=4
        )
    ),
    max_leaves=8,
)
SPECS = st.dictionaries(st.sampled_from([path[0] for path in known_paths() if len(path) == 1]), VALUES, max_size=6)
FAST = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)


@FAST
@given(SPECS)
def test_any_mapping_is_a_spec_or_invalid(tmp_path_factory: pytest.TempPathFactory, spec: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "mapping.yaml"
    survive(path, json.dumps({"name": "a", "command": "b", **spec}), {"X": "7"})


@FAST
@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"#%@`,?.$~<0=\n\t \\\x85\ufeff") | st.characters(), max_size=60))
def test_any_text_is_a_spec_or_invalid(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    survive(path, text, {})
    survive(path, f"{OK}{text}", {})
    survive(path, OK, {}, (text,))
    survive(path, OK, {}, (f"env={text}", f"stop.{text}=3"))


PLACES = [".".join("0" if part == "*" else part for part in path) for path in known_paths()]


@FAST
@given(
    place=st.sampled_from(PLACES),
    secret=st.text("abcdefgh{}[]()'\"\\:/0123", min_size=8, max_size=20),
    form=st.sampled_from(["${S}", "s3://${S}", "file:///${S}/..", "[x, '${S}']", "{${S}: 1}", '"${S}"']),
)
def test_no_problem_tells_a_secret(
    tmp_path_factory: pytest.TempPathFactory, place: str, secret: str, form: str
) -> None:
    """Whether it is declared or not: what comes from the environment is not shown."""
    path = tmp_path_factory.getbasetemp() / "secret.yaml"
    base = f'{OK}data: [{{source: "file:///x"}}]\nnotify: [{{command: x}}]\n'
    for declared in ("", "secrets: [S]\n"):
        assert secret not in survive(path, base + declared, {"S": secret}, (f"{place}={form}",))


def test_a_declared_secret_is_masked_even_where_the_file_tells_it(tmp_path: Path) -> None:
    said = survive(tmp_path / "job.yaml", f"{OK}secrets: [S]\nstore: hunter22\nhunter22: 1\n", {"S": "hunter22"})
    assert "hunter22" not in said
    assert "***" in said


@pytest.mark.parametrize(("value", "message"), [("abc", "too short"), ("", "not set")])
def test_secrets_that_cannot_be_masked_are_refused(tmp_path: Path, value: str, message: str) -> None:
    said = survive(tmp_path / "job.yaml", f"{OK}secrets: [THE_SECRET]\n", {"THE_SECRET": value})
    assert "job.yaml:3:11: secrets.0:" in said
    assert message in said
