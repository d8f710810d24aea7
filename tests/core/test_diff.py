"""What becomes of an object of a listing, as tables and as properties."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.core.diff import Folder, Odd, Selection, Skip, Verdict, Wanted, flaw, folders_above, judging, why_fetch


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    size: int = 1
    version: str = "v1"


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        # Without "/": the file's own name, anywhere.
        ("*.jpg", "a.jpg", True),
        ("*.jpg", "x/y/a.jpg", True),
        ("*.jpg", "x.jpg/a.png", False),
        ("labels.csv", "x/labels.csv", True),
        ("labels.csv", "x/mylabels.csv", False),
        ("?.txt", "d/a.txt", True),
        ("?.txt", "d/ab.txt", False),
        ("*", "x/y", True),
        ("**", "x/y", True),
        # With "/": the whole path.
        ("x/*.jpg", "x/a.jpg", True),
        ("x/*.jpg", "x/y/a.jpg", False),
        ("x/*.jpg", "w/x/a.jpg", False),
        ("x/**", "x/y/a.jpg", True),
        ("x/**", "x", False),
        ("x/", "x/y/a.jpg", True),
        ("x/", "x", False),
        ("/a.jpg", "a.jpg", True),
        ("/a.jpg", "x/a.jpg", False),
        ("**/a.jpg", "a.jpg", True),
        ("**/a.jpg", "x/y/a.jpg", True),
        ("**/a.jpg", "x/ya.jpg", False),
        ("x/**/a.jpg", "x/a.jpg", True),
        ("x/**/a.jpg", "x/1/2/a.jpg", True),
        ("x/**/a.jpg", "x/1/2/ba.jpg", False),
        ("x**/a.jpg", "xa.jpg", False),
        ("x**/a.jpg", "x1/2/a.jpg", True),
        ("**/**/**/a", "a", True),
        ("x/?/a", "x/y/a", True),
        ("x?y", "x/y", False),
        # Sets.
        ("[a-c].txt", "b.txt", True),
        ("[a-c].txt", "d.txt", False),
        ("[!a-c].txt", "d.txt", True),
        ("[!a-c].txt", "b.txt", False),
        ("x[!a]y/z", "x/y/z", False),
        ("x[+-9]y/z", "x/y/z", False),
        ("x[+-9]y/z", "x5y/z", True),
        ("[z-a]", "z", False),
        ("[!z-a]", "z", True),
        ("[]]", "]", True),
        ("[^a]", "^", True),
        ("[^a]", "b", False),
        # Characters that mean something only to regular expressions.
        ("[", "[", True),
        ("[]", "[]", True),
        ("[!]", "[!]", True),
        ("a.b", "axb", False),
        ("a+(b)|c$", "a+(b)|c$", True),
        ("a\\d", "a\\d", True),
        ("é*", "été", True),
        ("*", "line\nbreak", True),
        ("", "a", False),
        ("/", "a/b", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert (Selection((pattern,)).why_not()(path) == "") is expected


@settings(deadline=None)
@given(st.text(alphabet="ab/*?[]!-.^\\", max_size=12), st.text(alphabet="ab/.-", max_size=8))
def test_no_pattern_is_an_error(pattern: str, path: str) -> None:
    Selection((pattern,)).why_not()(path)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), ["a.jpg", "a.txt", "val/a.jpg"]),
        (("*.jpg",), (), ["a.jpg", "val/a.jpg"]),
        ((), ("*.jpg",), ["a.txt"]),
        (("*.jpg", "*.txt"), ("val/",), ["a.jpg", "a.txt"]),
        (("*.jpg",), ("*.jpg",), []),
        (("nothing",), (), []),
    ],
)
def test_exclude_wins(include: tuple[str, ...], exclude: tuple[str, ...], expected: list[str]) -> None:
    items = [Item("a.jpg"), Item("a.txt"), Item("val/a.jpg")]
    verdicts = [judging(selection=Selection(include, exclude))(item) for item in items]
    assert [one.path for one in verdicts if isinstance(one, Wanted)] == expected
    skipped = [one for one in verdicts if isinstance(one, Skip)]
    assert {skip.reason for skip in skipped} <= {"excluded", "not included"}
    assert len(expected) + len(skipped) == 3


def test_exclude_comes_before_every_complaint() -> None:
    judge = judging(selection=Selection(exclude=("../**", "a/**")))
    assert [judge(Item(key)) for key in ("../up", "a//b")] == [Skip("../up", "excluded"), Skip("a//b", "excluded")]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", {"data/a": "data/a", "data/b/c": "data/b/c", "database": "database"}),
        ("data", {"a": "data/a", "b/c": "data/b/c"}),
        ("data/", {"a": "data/a", "b/c": "data/b/c"}),
        ("data/b", {"c": "data/b/c"}),
        ("database", {"database": "database"}),
        ("data/b/c", {"c": "data/b/c"}),
        ("dat", {}),
    ],
)
def test_the_prefix_is_a_folder_or_one_object(prefix: str, expected: dict[str, str]) -> None:
    verdicts = list(map(judging(prefix), [Item("data/a"), Item("data/b/c"), Item("database")]))
    assert {one.path: one.key for one in verdicts if isinstance(one, Wanted)} == expected
    assert {one.reason for one in verdicts if isinstance(one, Skip)} <= {"outside of the source"}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Item("p/", 0), Skip("p/", "the source's own folder")),
        (Item("p/x/", 0), Folder("x", "p/x/")),
        (Item("p/x/y/", 0), Folder("x/y", "p/x/y/")),
        (Item("p/x/", 9), Odd("p/x/", "its name is a folder's, but it has content")),
        (Item("p/x/f", 3, "v"), Wanted("x/f", "p/x/f", 3, "v")),
    ],
)
def test_markers_of_folders(item: Item, expected: Verdict) -> None:
    assert judging("p")(item) == expected


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("../x", "'.' or '..'"),
        ("a/../../x", "'.' or '..'"),
        ("a/./x", "'.' or '..'"),
        ("..", "'.' or '..'"),
        ("../", "'.' or '..'"),
        ("/etc/passwd", "empty name"),
        ("a//b", "empty name"),
        ("a//", "empty name"),
        ("/", "empty name"),
        ("a\nb", "control"),
        ("a\n", "control"),
        ("a\x00b", "control"),
        ("a\x7fb", "control"),
        ("\udcff", "Unicode"),
        ("n" * 256, "longer"),
        ("ü" * 128, "longer"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "p"])
def test_hostile_keys_are_odd(key: str, why: str, prefix: str) -> None:
    full = f"{prefix}/{key}" if prefix else key
    verdict = judging(prefix)(Item(full, 0))
    assert isinstance(verdict, Odd)
    assert verdict.key == full
    assert why in verdict.reason


LONG = "/".join(["n" * 255] * 4) + "/"
"""1,024 bytes."""


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "..a",
        "a..",
        "...",
        ".a/b",
        "n" * 255,
        "ü" * 127,
        "a b",
        "C:\\x",
        "~",
        "-rf",
        LONG[:-1],
        "e\u0301",
        "\u00e9",
    ],
)
def test_harmless_paths(path: str) -> None:
    assert flaw(path) == ""


@pytest.mark.parametrize(
    ("known", "intact", "reason"),
    [
        (None, False, "new"),
        (Item("k"), True, ""),
        (Item("k"), False, "damaged"),
        (Item("k", 2, "v1"), True, "changed"),
        (Item("k", 1, "v2"), True, "changed"),
        (Item("p/k"), True, "changed"),
    ],
)
def test_why_something_is_fetched(known: Item | None, intact: bool, reason: str) -> None:
    assert why_fetch(Item("k"), known, intact=intact) == reason


def test_folders_above() -> None:
    assert list(folders_above("a/b/c")) == ["a/b", "a"]
    assert list(folders_above("a")) == []


SEGMENT = st.sampled_from(["a", "b", "c", "..", ".", "", "x\n", "a" * 256, "a" * 255])
KEY = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join).filter(bool)
PREFIX = st.sampled_from(["", "a", "a/b", "a/b/"])


@settings(deadline=None)
@given(st.builds(Item, KEY, st.integers(0, 1)), PREFIX)
def test_nothing_is_ever_wanted_outside(item: Item, prefix: str) -> None:
    verdict = judging(prefix)(item)
    assert verdict.key == item.key
    if isinstance(verdict, Wanted | Folder):
        assert posixpath.normpath(posixpath.join("/cache", verdict.path)) == "/cache/" + verdict.path
        assert not verdict.path.startswith("/")
        assert item.key.removesuffix("/").endswith(verdict.path)
