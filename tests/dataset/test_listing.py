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
from runner.dataset.listing import Amount, Listing, Need, Todo
from runner.dataset.record import Entry, Header, Record
from runner.dataset.task import Recorded


def wanted(path: str, size: int = 1, version: str = "v") -> Wanted:
    return Wanted(path, f"p/{path}", size, version)


def recorded(path: str, size: int = 1, version: str = "v") -> Recorded:
    return Recorded(path, f"p/{path}", size, version, 1, "00000000")


@contextmanager
def opened(folder: Path, *known: Recorded) -> Iterator[tuple[Record, Listing]]:
    entry = Entry(folder / "entry")
    with Record(entry, Header("u")) as record:
        record.reopen()
        record.add(known)
        with Listing(record, entry) as listing:
            yield record, listing


def taken(listing: Listing, todo: Todo = Todo.SMALL) -> list[str]:
    return [item.path for item in listing.take(todo, 100)]


def test_each_is_handed_out_once(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, listing):
        listing.add([(wanted("a"), Todo.SMALL), (wanted("b"), Todo.BIG), (wanted("c"), None)])
        assert listing.still_to_fetch() == Amount(2, 2)
        assert (taken(listing), taken(listing, Todo.BIG)) == (["a"], ["b"])
        assert (taken(listing), taken(listing, Todo.BIG)) == ([], [])
        assert listing.still_to_fetch() == Amount()
        assert listing.count() == 3
        listing.put_back(wanted("a"))
        assert taken(listing) == ["a"]


def test_no_more_than_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, listing):
        listing.add([(wanted(f"{number:04}"), Todo.SMALL) for number in range(2500)])
        assert (listing.waiting(Todo.SMALL), listing.waiting(Todo.BIG)) == (2500, 0)
        sizes = [len(listing.take(Todo.SMALL, count)) for count in (1, 7, 5000, 5000, 5000)]
        assert sizes == [1, 7, 1000, 1000, 492]
        assert listing.waiting(Todo.SMALL) == 0


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
    with opened(tmp_path, *map(recorded, known)) as (_, listing):
        listing.add([(wanted(path), Todo.SMALL) for path in listed])
        assert taken(listing) == free
        assert listing.waiting(Todo.BLOCKED) == len(listed) - len(free)
        listing.unblock()
        assert listing.waiting(Todo.SMALL) == len(listed) - len(free)


def test_what_lies_below_a_file_that_was_handed_out_waits(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, listing):
        listing.add([(wanted("x"), Todo.SMALL)])
        assert taken(listing) == ["x"]
        listing.add([(wanted("x/y"), Todo.SMALL), (wanted("x/z", 20 << 20), Todo.BIG)])
        [odd] = listing.leave_out_contended()
        assert (odd.key, odd.reason) == ("p/x", "it would be a file where 'p/x/y' needs a folder")
        assert (taken(listing), taken(listing, Todo.BIG)) == ([], [])
        assert listing.waiting(Todo.BLOCKED) == 2
        listing.unblock()
        assert (taken(listing), taken(listing, Todo.BIG)) == (["x/y"], ["x/z"])


def test_folders_with_the_name_of_a_file_are_not_made(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, listing):
        listing.add([(wanted("x"), None), (wanted("y/z"), None)])
        listing.add_folders(["x", "x/below", "y", "w", "w"])
        assert list(listing.folders()) == ["w", "y"]


PATH = st.lists(st.sampled_from(["a", "b", "a-", "a0", "ü", "\U0001f600"]), min_size=1, max_size=3).map("/".join)


@settings(deadline=None, max_examples=60)
@given(st.sets(PATH), st.sets(PATH))
def test_what_stays_can_stand_together(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str], known: set[str]
) -> None:
    contended = {path for path in paths if any(other.startswith(path + "/") for other in paths)}
    with opened(tmp_path_factory.mktemp("entry"), *map(recorded, known)) as (_, listing):
        listing.add([(wanted(path), Todo.SMALL) for path in paths])
        odd = list(listing.leave_out_contended())
        assert {one.key for one in odd} == {f"p/{path}" for path in contended}
        assert listing.count() == len(paths - contended)
        assert {path for some in listing.gone() for path in some} == known - (paths - contended)


def test_room_is_for_what_is_not_handed_out(tmp_path: Path) -> None:
    known = [recorded("same", 5000), recorded("changed", 5000), recorded("kept", 5000)]
    with opened(tmp_path, *known) as (_, listing):
        listing.add([(wanted("new", 1), Todo.SMALL), (wanted("same", 5000), Todo.SMALL), (wanted("kept", 5000), None)])
        listing.add([(wanted("changed", 9000, "w"), Todo.SMALL), (wanted("big", 20 << 20), Todo.BIG)])
        size = 1 + 5000 + 4000 + (20 << 20)
        assert listing.need(4096) == Need(size, 4096 + 8192 + 4096 + (20 << 20), 3)
        listing.take(Todo.BIG, 1)
        assert listing.need(4096) == Need(size - (20 << 20), 4096 + 8192 + 4096, 2)


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


def test_of_two_names_for_one_file_the_first_is_kept(tmp_path: Path) -> None:
    entry = Entry(tmp_path / "entry")
    with (
        Record(entry, Header("u")) as record,
        Listing(record, entry, folding(case=True, form=True)) as listing,
    ):
        kept, odd = listing.sift([wanted("A.txt"), wanted("b.txt")])
        assert ([item.path for item in kept], odd) == (["A.txt", "b.txt"], [])
        kept, odd = listing.sift([wanted("a.txt"), wanted("B.txt"), wanted("c"), wanted("C")])
        assert [item.path for item in kept] == ["c"]
        assert [(one.key, one.reason) for one in odd] == [
            ("p/a.txt", "this disk takes it for 'A.txt'"),
            ("p/B.txt", "this disk takes it for 'b.txt'"),
            ("p/C", "this disk takes it for 'c'"),
        ]
        assert listing.is_place_of_another("a.TXT")
        assert not listing.is_place_of_another("d")
