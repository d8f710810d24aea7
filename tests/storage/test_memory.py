"""Faults on demand do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import StoreUnreachable
from runner.storage.memory import Fault, FaultPlan, MemoryStore

CUT = StoreUnreachable("the line was cut")


def once(operation: str, fault: Fault) -> FaultPlan:
    return lambda asked, _key, nth: fault if asked == operation and nth == 0 else None


def test_a_plain_fault_happens_before_anything(tmp_path: Path) -> None:
    store = MemoryStore(once("write", Fault(CUT)))
    with pytest.raises(StoreUnreachable):
        store.write("k", b"x")
    assert list(store.list()) == []
    assert store.write("k", b"x").size == 1


def test_an_upload_cut_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    source, moved = tmp_path / "source", list[int]()
    source.write_bytes(b"x" * (3 << 20))
    store = MemoryStore(once("upload", Fault(CUT, cut=2_000_000)))
    with pytest.raises(StoreUnreachable):
        store.upload(source, "k", on_bytes=moved.append)
    assert sum(moved) == 2_000_000
    assert list(store.list()) == []


def test_a_download_cut_in_the_middle_leaves_a_piece(tmp_path: Path) -> None:
    store = MemoryStore(once("download", Fault(CUT, cut=2)), objects={"k": b"12345"})
    with pytest.raises(StoreUnreachable):
        store.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"12"


def test_a_lost_answer_is_a_write_that_landed() -> None:
    store = MemoryStore(once("write", Fault(CUT, landed=True)))
    with pytest.raises(StoreUnreachable):
        store.write("k", b"x", only_new=True)
    assert store.read("k") == b"x"


def test_a_delete_may_stop_half_way() -> None:
    store = MemoryStore(lambda op, key, _: Fault(CUT) if (op, key) == ("delete", "b") else None)
    for key in "abc":
        store.write(key, b"")
    with pytest.raises(StoreUnreachable):
        store.delete("abc")
    assert [info.key for info in store.list()] == ["b", "c"]


def test_a_listing_may_break_off() -> None:
    store = MemoryStore(once("list", Fault(CUT, cut=1)), objects={"a": b"", "b": b""})
    with pytest.raises(StoreUnreachable):
        list(store.list())
    assert [info.key for info in store.list()] == ["a", "b"]


def test_delays_go_through_the_sleep_that_was_given() -> None:
    slept: list[float] = []
    store = MemoryStore(lambda _op, _key, nth: Fault(delay=1.5 + nth), objects={"k": b"x"}, sleep=slept.append)
    assert store.read("k") + store.read("k") == b"xx"
    assert slept == [1.5, 2.5]


def test_objects_may_have_keys_that_cannot_be_written() -> None:
    store = MemoryStore(objects={"../x": b"1", "a//b": b"2", "d/": b""})
    assert [info.key for info in store.list()] == ["../x", "a//b", "d/"]
