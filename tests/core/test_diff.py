"""Listing x record -> plan, as tables and as properties."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.core.diff import Conflict, Fetch, Folder, Keep, Plan, Remove, Selection, Skip, Totals, flaw, plan


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
    result = plan(items, {}, selection=Selection(include, exclude))
    assert [fetch.path for fetch in result.fetch] == expected
    assert {skip.reason for skip in result.skip} <= {"excluded", "not included"}
    assert len(result.fetch) + len(result.skip) == 3


def test_everything_is_new_at_first() -> None:
    result = plan([Item("a", 3, "x"), Item("b/c", 4, "y")], {})
    assert result.fetch == (Fetch("a", "a", 3, "x", "new"), Fetch("b/c", "b/c", 4, "y", "new"))
    assert result.totals == Totals(fetch_files=2, fetch_bytes=7, keep_files=0, keep_bytes=0)
    assert (result.keep, result.remove, result.folders, result.skip, result.conflicts) == ((), (), (), (), ())


def test_what_is_there_is_kept_and_what_has_gone_goes() -> None:
    record = {"same": Item("p/same"), "new": Item("p/new", 1, "v0"), "bad": Item("p/bad"), "gone": Item("p/gone")}
    listing = [Item("p/same"), Item("p/new"), Item("p/bad")]
    result = plan(listing, record, prefix="p/", damaged={"bad", "gone"})
    assert result.keep == (Keep("same", "p/same", 1, "v1"),)
    assert [(fetch.path, fetch.reason) for fetch in result.fetch] == [("new", "changed"), ("bad", "damaged")]
    assert result.remove == (Remove("gone", "no longer in the source"),)


@pytest.mark.parametrize("now", [Item("k", 2, "v1"), Item("k", 1, "v2")])
def test_another_size_or_version_is_a_change(now: Item) -> None:
    assert plan([now], {"k": Item("k")}).fetch[0].reason == "changed"


def test_another_key_for_the_same_path_is_a_change() -> None:
    assert plan([Item("p/k")], {"k": Item("k")}, prefix="p").fetch[0].reason == "changed"


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
    result = plan([Item("data/a"), Item("data/b/c"), Item("database")], {}, prefix=prefix)
    assert {fetch.path: fetch.key for fetch in result.fetch} == expected


def test_directory_markers_make_folders() -> None:
    listing = [Item("p/", 0), Item("p/x/", 0), Item("p/x/f"), Item("p/empty/", 0), Item("p/full/", 9)]
    result = plan(listing, {}, prefix="p")
    assert result.folders == (Folder("x", "p/x/"), Folder("empty", "p/empty/"))
    assert result.skip == (
        Skip("p/", "the source's own folder"),
        Skip("p/full/", "its name is a folder's, but it has content"),
    )
    assert [fetch.path for fetch in result.fetch] == ["x/f"]


def test_a_marker_beside_a_file_is_nothing() -> None:
    result = plan([Item("x/", 0), Item("x"), Item("x/y/", 0)], {})
    assert [fetch.path for fetch in result.fetch] == ["x"]
    assert [skip.key for skip in result.skip] == ["x/", "x/y/"]
    assert not result.folders
    assert not result.conflicts


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("below", ["x/y", "x/y/z"])
def test_a_file_and_a_folder_of_one_name_are_a_conflict(below: str, order: int) -> None:
    result = plan([Item("x"), Item(below)][::order], {"old": Item("old")})
    assert result.conflicts == (Conflict(("x", below), "'x' would be a file and a folder"),)
    assert result.remove == ()


def test_two_keys_for_one_path_are_a_conflict() -> None:
    result = plan([Item("a/b"), Item("a/b/b")], {}, prefix="a/b")
    assert result.conflicts == (Conflict(("a/b", "a/b/b"), "both would be 'b'"),)


def test_exclude_resolves_a_conflict() -> None:
    listing = [Item("x"), Item("x/y"), Item("../up")]
    assert len(plan(listing, {}).conflicts) == 2
    assert plan(listing, {}, selection=Selection(exclude=("x/**", "../**"))).conflicts == ()


def test_a_key_that_is_listed_twice_counts_once() -> None:
    result = plan([Item("k", 1, "v1"), Item("k", 2, "v2")], {})
    assert result.fetch == (Fetch("k", "k", 2, "v2", "new"),)


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
        ("a\x00b", "control"),
        ("a\x7fb", "control"),
        ("\udcff", "Unicode"),
        ("n" * 256, "longer"),
        ("ü" * 128, "longer"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "p"])
def test_hostile_keys_are_refused(key: str, why: str, prefix: str) -> None:
    full = f"{prefix}/{key}" if prefix else key
    result = plan([Item(full, 0), Item(f"{prefix}/ok".strip("/"))], {}, prefix=prefix)
    [conflict] = result.conflicts
    assert conflict.keys == (full,)
    assert why in conflict.reason
    assert [fetch.path for fetch in result.fetch] == ["ok"]


@pytest.mark.parametrize("path", ["a", "..a", "a..", "...", ".a/b", "n" * 255, "a b", "C:\\x", "~", "-rf"])
def test_harmless_paths(path: str) -> None:
    assert flaw(path) == ""


SEGMENT = st.sampled_from(["a", "b", "c", "..", ".", "", "x\n", "a" * 256, "a" * 255])
KEY = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join).filter(bool)
ITEM = st.builds(Item, KEY, st.integers(0, 3), st.sampled_from(["v1", "v2"]))
LISTING = st.lists(ITEM, max_size=12)
PREFIX = st.sampled_from(["", "a", "a/b", "a/b/"])
RECORD = st.dictionaries(st.sampled_from(["a", "b", "a/b", "b/c", "c"]), ITEM, max_size=4)


def paths_of(result: Plan) -> set[str]:
    fetched, kept = {fetch.path for fetch in result.fetch}, {keep.path for keep in result.keep}
    return fetched | kept | {folder.path for folder in result.folders}


@settings(deadline=None)
@given(LISTING, RECORD, PREFIX)
def test_nothing_is_ever_planned_outside(listing: list[Item], record: dict[str, Item], prefix: str) -> None:
    result = plan(listing, record, prefix=prefix)
    for path in paths_of(result):
        assert posixpath.normpath(posixpath.join("/cache", path)) == "/cache/" + path
        assert not path.startswith("/")


@settings(deadline=None)
@given(LISTING, RECORD, PREFIX)
def test_every_object_is_accounted_for_once(listing: list[Item], record: dict[str, Item], prefix: str) -> None:
    result = plan(listing, record, prefix=prefix)
    told = {key for conflict in result.conflicts for key in conflict.keys}
    told |= {fetch.key for fetch in result.fetch} | {keep.key for keep in result.keep}
    told |= {folder.key for folder in result.folders} | {skip.key for skip in result.skip}
    assert told == {item.key for item in listing}
    assert len(paths_of(result)) == len(result.fetch) + len(result.keep) + len(result.folders)


@settings(deadline=None)
@given(LISTING, RECORD, PREFIX)
def test_files_of_a_plan_without_conflicts_can_stand_together(
    listing: list[Item], record: dict[str, Item], prefix: str
) -> None:
    result = plan(listing, record, prefix=prefix)
    folders = {item.path for item in result.folders}
    files = paths_of(result) - folders
    if not result.conflicts:
        above = {path[:end] for path in files | folders for end in range(len(path)) if path[end] == "/"}
        assert files.isdisjoint(above | folders)
        assert {item.path for item in result.remove} == record.keys() - files


@settings(deadline=None)
@given(LISTING, PREFIX)
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(listing: list[Item], prefix: str) -> None:
    first = plan(listing, {}, prefix=prefix)
    record = {fetch.path: Item(fetch.key, fetch.size, fetch.version) for fetch in first.fetch}
    second = plan(listing, record, prefix=prefix)
    assert (second.fetch, second.remove) == ((), ())
    assert len(second.keep) == len(first.fetch)
    assert second.totals.keep_bytes == first.totals.fetch_bytes
