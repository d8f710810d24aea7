"""The listing on the disk: what waits, what stands in the way of what, what two names are one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.core.diff import Wanted
from runner.dataset.folding import folding, folding_of
from runner.dataset.record import Entry, Header, Record
from runner.dataset.room import Need
from runner.dataset.task import Recorded
from runner.dataset.worklist import Amount, Todo, Worklist


def wanted(path: str, size: int = 1, version: str = "v") -> Wanted:
    return Wanted(path, f"p/{path}", size, version)


def recorded(path: str, size: int = 1, version: str = "v") -> Recorded:
    return Recorded(path, f"p/{path}", size, version, 1, "00000000")


@contextmanager
def opened(folder: Path, *known: Recorded) -> Iterator[tuple[Record, Worklist]]:
    entry = Entry(folder / "entry")
    with Record(entry, Header("u")) as record:
        record.reopen()
        record.add(known)
        with Worklist(record, entry) as worklist:
            yield record, worklist


def taken(worklist: Worklist, todo: Todo = Todo.SMALL) -> list[str]:
    return [item.path for item in worklist.take(todo, 100)]


def test_each_is_handed_out_once(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, worklist):
        worklist.add([(wanted("a"), Todo.SMALL), (wanted("b"), Todo.BIG), (wanted("c"), None)])
        assert worklist.still_to_fetch() == Amount(2, 2)
        assert (taken(worklist), taken(worklist, Todo.BIG)) == (["a"], ["b"])
        assert (taken(worklist), taken(worklist, Todo.BIG)) == ([], [])
        assert worklist.still_to_fetch() == Amount()
        assert worklist.count() == 3
        worklist.put_back(wanted("a"))
        assert taken(worklist) == ["a"]


def test_of_a_key_that_is_told_twice_the_later_news_of_a_page_counts(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, worklist):
        assert worklist.new([wanted("a", 1, "first"), wanted("b"), wanted("a", 2, "later")]) == [
            wanted("a", 2, "later"),
            wanted("b"),
        ]
        worklist.add([(wanted("a", 2, "later"), Todo.SMALL)])
        assert worklist.new([wanted("a", 3, "last"), wanted("c")]) == [wanted("c")]


def test_no_more_than_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, worklist):
        worklist.add([(wanted(f"{number:04}"), Todo.SMALL) for number in range(2500)])
        assert (worklist.waiting(Todo.SMALL), worklist.waiting(Todo.BIG)) == (2500, 0)
        sizes = [len(worklist.take(Todo.SMALL, count)) for count in (1, 7, 5000, 5000, 5000)]
        assert sizes == [1, 7, 1000, 1000, 492]
        assert worklist.waiting(Todo.SMALL) == 0


@pytest.mark.parametrize(
    ("known", "listed", "free"),
    [
        ([], ["x", "x/y"], []),
        ([], ["x-", "x0", "x/y"], ["x-", "x/y", "x0"]),
        (["x"], ["x/y/z", "w"], ["w"]),
        (["x/y/z"], ["x", "x/y", "x/y/a"], []),
        (["x/y"], ["x/z", "x/y/w"], ["x/z"]),
    ],
)
def test_what_stands_in_the_way_puts_aside(
    tmp_path: Path, known: list[str], listed: list[str], free: list[str]
) -> None:
    with opened(tmp_path, *map(recorded, known)) as (_, worklist):
        worklist.add([(wanted(path), Todo.SMALL) for path in listed])
        assert taken(worklist) == free
        assert worklist.waiting(Todo.BLOCKED) == len(listed) - len(free)
        worklist.unblock()
        assert worklist.waiting(Todo.SMALL) == len(listed) - len(free)


def test_what_lies_below_a_file_that_was_handed_out_waits(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, worklist):
        worklist.add([(wanted("x"), Todo.SMALL)])
        assert taken(worklist) == ["x"]
        worklist.add([(wanted("x/y"), Todo.SMALL), (wanted("x/z", 20 << 20), Todo.BIG)])
        [odd] = worklist.leave_out_contended()
        assert (odd.key, odd.reason) == ("p/x", "it would be a file where 'p/x/y' needs a folder")
        assert (taken(worklist), taken(worklist, Todo.BIG)) == ([], [])
        assert worklist.waiting(Todo.BLOCKED) == 2
        worklist.unblock()
        assert (taken(worklist), taken(worklist, Todo.BIG)) == (["x/y"], ["x/z"])


def test_folders_with_the_name_of_a_file_are_not_made(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, worklist):
        worklist.add([(wanted("x"), None), (wanted("y/z"), None)])
        worklist.add_folders(["x", "x/below", "y", "w", "w"])
        assert list(worklist.folders()) == ["w", "y"]


PATH = st.lists(st.sampled_from(["a", "b", "a-", "a0", "ü", "\U0001f600"]), min_size=1, max_size=3).map("/".join)


@settings(deadline=None, max_examples=60)
@given(st.sets(PATH), st.sets(PATH))
def test_what_stays_can_stand_together(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str], known: set[str]
) -> None:
    contended = {path for path in paths if any(other.startswith(path + "/") for other in paths)}
    with opened(tmp_path_factory.mktemp("entry"), *map(recorded, known)) as (_, worklist):
        worklist.add([(wanted(path), Todo.SMALL) for path in paths])
        odd = list(worklist.leave_out_contended())
        assert {one.key for one in odd} == {f"p/{path}" for path in contended}
        assert worklist.count() == len(paths - contended)
        assert {path for some in worklist.gone() for path in some} == known - (paths - contended)


def test_room_is_for_what_is_not_handed_out(tmp_path: Path) -> None:
    known = [recorded("same", 5000), recorded("changed", 5000), recorded("kept", 5000)]
    with opened(tmp_path, *known) as (_, worklist):
        worklist.add([(wanted("new", 1), Todo.SMALL), (wanted("same", 5000), Todo.SMALL), (wanted("kept", 5000), None)])
        worklist.add([(wanted("changed", 9000, "w"), Todo.SMALL), (wanted("big", 20 << 20), Todo.BIG)])
        size = 1 + 5000 + 4000 + (20 << 20)
        assert worklist.need(4096) == Need(size, 4096 + 8192 + 4096 + (20 << 20), 3)
        worklist.take(Todo.BIG, 1)
        assert worklist.need(4096) == Need(size - (20 << 20), 4096 + 8192 + 4096, 2)


# File systems that take two names for one


def test_this_disk_tells_all_names_apart(tmp_path: Path) -> None:
    assert folding_of(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("case", "form", "alike", "apart"),
    [
        (True, True, ["A/É.txt", "a/é.txt", "a/e\u0301.TXT"], "a/e.txt"),
        (False, True, ["a/é", "a/e\u0301"], "A/é"),
    ],
)
def test_names_that_are_alike(case: bool, form: bool, alike: list[str], apart: str) -> None:
    fold = folding(case=case, form=form)
    assert fold
    assert len({fold(path) for path in alike}) == 1
    assert fold(apart) not in {fold(path) for path in alike}


@contextmanager
def folded(folder: Path, *known: Recorded) -> Iterator[Worklist]:
    entry = Entry(folder / "entry")
    with (
        Record(entry, Header("u")) as record,
        Worklist(record, entry, folding(case=True, form=True)) as worklist,
    ):
        record.reopen()
        record.add(known)
        yield worklist


@pytest.mark.parametrize("order", [1, -1])
def test_of_names_for_one_file_that_of_the_first_key_is_kept(tmp_path: Path, order: int) -> None:
    with folded(tmp_path) as worklist:
        for path in ["A.txt", "B.txt", "C", "a.txt", "b.txt", "c", "d/x", "D/y"][::order]:
            worklist.add([(wanted(path), Todo.SMALL)])
        odd = list(worklist.leave_out_contended())
        assert sorted((one.key, one.reason) for one in odd) == [
            ("p/a.txt", "this disk takes it for 'A.txt'"),
            ("p/b.txt", "this disk takes it for 'B.txt'"),
            ("p/c", "this disk takes it for 'C'"),
        ]
        assert sorted(taken(worklist)) == ["A.txt", "B.txt", "C", "D/y", "d/x"]
        assert worklist.is_place_of_another("a.TXT")
        assert not worklist.is_place_of_another("d")


def test_a_file_with_the_name_of_a_folder_is_found_under_any_spelling(tmp_path: Path) -> None:
    with folded(tmp_path) as worklist:
        worklist.add([(wanted("A"), Todo.SMALL), (wanted("a/1"), Todo.SMALL), (wanted("X"), Todo.SMALL)])
        worklist.add_folders(["x/empty", "fine"])
        [odd] = worklist.leave_out_contended()
        assert (odd.key, odd.reason) == ("p/A", "it would be a file where 'p/a/1' needs a folder")
        assert sorted(taken(worklist)) == ["X", "a/1"]
        assert list(worklist.folders()) == ["fine"]


def test_strangers_are_neither_listed_nor_recorded(tmp_path: Path) -> None:
    with opened(tmp_path, recorded("known")) as (_, worklist):
        worklist.add([(wanted("listed"), None)])
        assert worklist.strangers(["known", "odd\n", "listed", "other", "un\udc80known"]) == [
            "odd\n",
            "other",
            "un\udc80known",
        ]
    with folded(tmp_path) as worklist:
        worklist.add([(wanted("Name"), None)])
        assert worklist.strangers(["NAME", "other"]) == ["other"]
