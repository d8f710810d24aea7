"""Bringing a source into the cache: what is fetched, what is not, and what survives."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from runner.dataset.cache import DataCache, entry_name
from runner.dataset.fetch import MADE_AT_MOST, Places, SyncStopped
from runner.dataset.record import Entry, Header
from runner.dataset.source import Source
from runner.dataset.sync import Dataset, SyncProgress
from runner.errors import AccessDenied, DataError, DiskFull, NotYetError, ObjectChanged, ObjectMissing, StoreUnreachable
from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, ignore_bytes
from runner.storage.folder import FolderStore
from runner.storage.memory import Fault, MemoryStore


class Counting(FolderStore):
    """A folder that remembers what was fetched, and can do something before that."""

    def __init__(self, root: Path, before: Callable[[str], None] = lambda _key: None) -> None:
        super().__init__(root)
        self.downloads: list[str] = []
        self.before = before

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        self.downloads.append(key)
        self.before(key)
        return super().look(key, at_most=at_most)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    for number in range(20):
        write(folder / f"train/{number % 3}/{number}.bin", b"%d" % number * 100)
    write(folder / "train/labels.csv", b"a,b\n")
    write(folder / "other/file", b"elsewhere")
    return folder


@pytest.fixture
def store(origin: Path) -> Counting:
    return Counting(origin)


@pytest.fixture
def cache(tmp_path: Path) -> DataCache:
    return DataCache(tmp_path / "cache")


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def source_of(store: ObjectStore, prefix: str = "train", **more: object) -> Source:
    return Source(f"{store.url}/{prefix}", store, prefix, **more)  # type: ignore[arg-type]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    infos = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): (info.st_ino, info.st_mtime_ns) for path, info in infos.items()}


def rows_of(dataset: Dataset) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(dataset.path.parent / "record.db")) as database:
        return database.execute("SELECT * FROM file ORDER BY path").fetchall()


def change_record(dataset: Dataset, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(dataset.path.parent / "record.db")) as database, database:
        database.execute(statement, values)


# The normal course


def test_a_first_sync_brings_everything(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    assert tree(dataset.path) == tree(origin / "train")
    assert (dataset.files, dataset.fetched_files) == (21, 21)
    assert dataset.bytes == dataset.fetched_bytes == sum(map(len, tree(origin / "train").values()))
    assert sorted(path.name for path in dataset.path.parent.iterdir()) == ["files", "in-use", "lock", "record.db"]


def test_the_record_tells_all(cache: DataCache, store: Counting) -> None:
    dataset = cache.sync(source_of(store, include=("*.csv",)))
    info = next(store.list("train/labels.csv"))
    header = Entry(dataset.path.parent).header()
    assert replace(header, completed_at=None) == Header(f"{store.url}/train", ("*.csv",), (), None, 1, 4)
    assert header.completed_at == pytest.approx(time.time(), abs=60)
    mtime_ns = (dataset.path / "labels.csv").stat().st_mtime_ns
    checksum = format(crc32c(b"a,b\n"), "08x")
    assert rows_of(dataset) == [("labels.csv", "train/labels.csv", 4, info.version, mtime_ns, checksum)]


def test_a_second_sync_does_nothing(cache: DataCache, store: Counting, tmp_path: Path) -> None:
    dataset = cache.sync(source_of(store))
    before = inodes(tmp_path / "cache")
    store.downloads.clear()
    again = cache.sync(source_of(store))
    assert store.downloads == []
    assert (again.files, again.bytes, again.fetched_files) == (dataset.files, dataset.bytes, 0)
    after = inodes(tmp_path / "cache")
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == {f"data/{dataset.path.parent.name}/in-use"}


def test_only_changes_are_brought(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    store.downloads.clear()
    (origin / "train/0/0.bin").write_bytes(b"changed")
    (origin / "train/labels.csv").write_bytes(b"b,a\n")
    (origin / "train/1/1.bin").unlink()
    write(origin / "train/new/folder/file", b"new")
    for path in (origin / "train/2").iterdir():
        path.unlink()
    (dataset.path / "notes.txt").write_text("not in any record")
    again = cache.sync(source_of(store))
    assert sorted(store.downloads) == ["train/0/0.bin", "train/labels.csv", "train/new/folder/file"]
    assert tree(again.path) == tree(origin / "train") | {"notes.txt": b"not in any record"}
    assert not (again.path / "2").exists()


@pytest.mark.parametrize(("before", "after"), [("x", "x/y/z"), ("x/y/z", "x")])
def test_a_file_may_become_a_folder_and_back(cache: DataCache, tmp_path: Path, before: str, after: str) -> None:
    folder = tmp_path / "origin"
    store = FolderStore(folder)
    for key in (before, after):
        write(folder / "keep", b"")
        store.write(key, key.encode())
        assert tree(cache.sync(source_of(store, "")).path) == {"keep": b"", key: key.encode()}
        store.delete([key])


def test_one_object_is_a_source_too(cache: DataCache, store: Counting) -> None:
    dataset = cache.sync(source_of(store, "train/labels.csv"))
    assert tree(dataset.path) == {"labels.csv": b"a,b\n"}
    assert cache.sync(source_of(store, "train/labels.csv")).fetched_files == 0


@pytest.mark.parametrize("prefix", ["", "train", "train/", "train/0"])
def test_a_prefix_is_a_folder(cache: DataCache, store: Counting, origin: Path, prefix: str) -> None:
    write(origin / "training/file", b"shares only the first letters")
    assert tree(cache.sync(source_of(store, prefix)).path) == tree(origin / prefix)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {"a.jpg", "a.txt", "val/a.jpg", "val/deep/b.txt"}),
        (("*.jpg",), (), {"a.jpg", "val/a.jpg"}),
        (("/*.jpg",), (), {"a.jpg"}),
        (("val/**",), (), {"val/a.jpg", "val/deep/b.txt"}),
        (("val/*",), (), {"val/a.jpg"}),
        ((), ("val/",), {"a.jpg", "a.txt"}),
        (("*.jpg", "*.txt"), ("a.*",), {"val/deep/b.txt"}),
    ],
)
def test_include_and_exclude(
    cache: DataCache, include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]
) -> None:
    store = MemoryStore(objects=dict.fromkeys(["a.jpg", "a.txt", "val/a.jpg", "val/deep/b.txt"], b"x"))
    dataset = cache.sync(Source("memory://data", store, include=include, exclude=exclude))
    assert tree(dataset.path).keys() == expected


def test_each_selection_has_its_own_copy(cache: DataCache, store: Counting) -> None:
    sources = [source_of(store), source_of(store, include=("*.csv",)), source_of(store, exclude=("*.csv",))]
    assert len({cache.sync(source).path for source in sources}) == 3
    assert [entry.files for entry in cache.entries()] == [21, 1, 20]


def test_markers_make_folders(cache: DataCache) -> None:
    store = MemoryStore(objects={"p/": b"", "p/empty/": b"", "p/full/": b"", "p/full/f": b"x"})
    dataset = cache.sync(source_of(store, "p"))
    assert (dataset.path / "empty").is_dir()
    assert tree(dataset.path) == {"full/f": b"x"}
    (dataset.path / "empty").rmdir()
    assert cache.sync(source_of(store, "p")).fetched_files == 0
    assert (dataset.path / "empty").is_dir()


def test_progress_is_told(cache: DataCache, store: Counting) -> None:
    told: list[SyncProgress] = []
    dataset = cache.sync(source_of(store), report=told.append)
    assert [phase for phase, _ in groupby(one.phase for one in told)] == ["listing", "copying", "done"]
    copying = [one for one in told if one.phase == "copying"]
    assert {(one.files_total, one.bytes_total, one.listed, one.complete) for one in copying} == {
        (21, dataset.bytes, 21, True)
    }
    assert (told[-1].files, told[-1].bytes) == (21, dataset.bytes)
    assert all(one.bytes <= one.bytes_total for one in copying)


# Damage


def test_damaged_files_are_brought_again(cache: DataCache, store: Counting, origin: Path, tmp_path: Path) -> None:
    dataset = cache.sync(source_of(store))
    store.downloads.clear()
    (dataset.path / "0/0.bin").write_bytes(b"longer than it was" * 100)
    (dataset.path / "1/1.bin").unlink()
    same_size = dataset.path / "2/2.bin"
    same_size.write_bytes(same_size.read_bytes()[::-1])
    linked = dataset.path / "0/3.bin"
    linked.unlink()
    linked.symlink_to(tmp_path / "outside")
    again = cache.sync(source_of(store))
    assert again.fetched_files == 4
    assert sorted(store.downloads) == [f"train/{name}.bin" for name in ["0/0", "0/3", "1/1", "2/2"]]
    assert tree(again.path) == tree(origin / "train")
    assert not linked.is_symlink()


def test_verify_repairs_what_stat_cannot_see(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    store.downloads.clear()
    victim = dataset.path / "0/9.bin"
    info, data = victim.stat(), victim.read_bytes()
    with victim.open("r+b") as file:
        file.write(bytes([data[0] ^ 1]))
    os.utime(victim, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert cache.sync(source_of(store)).fetched_files == 0
    assert cache.sync(source_of(store, verify=True)).fetched_files == 1
    assert store.downloads == ["train/0/9.bin"]
    assert tree(dataset.path) == tree(origin / "train")


@pytest.mark.parametrize("rubbish", [b"", b"no database", b"SQLite format 3\x00" + b"\xff" * 8000])
def test_a_broken_record_costs_time_not_truth(cache: DataCache, store: Counting, origin: Path, rubbish: bytes) -> None:
    dataset = cache.sync(source_of(store))
    (dataset.path.parent / "record.db").write_bytes(rubbish)
    assert [entry.complete for entry in cache.entries()] == [False]
    assert cache.sync(source_of(store)).fetched_files == 21
    assert tree(dataset.path) == tree(origin / "train")
    assert cache.sync(source_of(store)).fetched_files == 0


@pytest.mark.parametrize("page", range(1, 6))
def test_a_record_with_a_broken_page_costs_time_not_truth(cache: DataCache, page: int) -> None:
    store = MemoryStore(objects={f"k{number:04}": b"%d" % number for number in range(400)})
    dataset = cache.sync(Source("memory://s", store))
    record = dataset.path.parent / "record.db"
    assert record.stat().st_size > 6 * 4096
    with record.open("r+b") as file:
        file.seek(page * 4096)
        file.write(os.urandom(4096))
    assert cache.sync(Source("memory://s", store)).files == 400
    assert tree(dataset.path) == {f"k{number:04}": b"%d" % number for number in range(400)}
    assert cache.sync(Source("memory://s", store)).fetched_files == 0


@pytest.mark.parametrize("path", ["../../../../precious", "/precious", "a/../../../../../precious"])
def test_a_record_cannot_remove_files_elsewhere(cache: DataCache, store: Counting, tmp_path: Path, path: str) -> None:
    dataset = cache.sync(source_of(store))
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    change_record(dataset, "UPDATE file SET path = ? WHERE path = 'labels.csv'", path)
    assert cache.sync(source_of(store)).fetched_files == 1
    assert precious.exists()
    assert "labels.csv" in [row[0] for row in rows_of(dataset)]
    assert len(rows_of(dataset)) == 21


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("INSERT INTO file VALUES (x'2e2e2f', 'k', 1, 'v', 1, 'c')", ()),
        ("UPDATE file SET path = CAST(x'ff' AS TEXT) WHERE path = 'labels.csv'", ()),
        ("UPDATE file SET size = 'much' WHERE path = 'labels.csv'", ()),
        ("DROP TABLE file", ()),
        ("ALTER TABLE file DROP COLUMN crc32c", ()),
    ],
)
def test_a_record_of_nonsense_costs_time_not_truth(
    cache: DataCache, store: Counting, origin: Path, statement: str, values: tuple[object, ...]
) -> None:
    dataset = cache.sync(source_of(store))
    change_record(dataset, statement, *values)
    assert cache.sync(source_of(store)).fetched_files == 21
    assert tree(dataset.path) == tree(origin / "train")
    assert cache.sync(source_of(store)).fetched_files == 0


@pytest.mark.parametrize(("gone", "new"), [("a", "other"), ("a", "a/1/2"), ("d/e/x", "d"), ("d/e/x", "d/e")])
def test_what_came_and_is_not_on_record_goes_with_its_object(cache: DataCache, gone: str, new: str) -> None:
    """What a process leaves that is killed between putting a file into its place and recording it."""
    store = MemoryStore(objects={gone: b"old", "kept": b""}, url="memory://s")
    dataset = cache.sync(source_of(store, ""))
    change_record(dataset, "DELETE FROM file WHERE path = ?", gone)
    change_record(dataset, "UPDATE header SET completed_at = NULL")
    store.delete([gone])
    store.write(new, b"new")
    assert tree(cache.sync(source_of(store, "")).path) == {new: b"new", "kept": b""}


def test_a_folder_that_was_made_for_what_never_came_is_not_in_the_way(cache: DataCache) -> None:
    dataset = cache.sync(source_of(MemoryStore(objects={"kept": b""}, url="memory://s"), ""))
    change_record(dataset, "UPDATE header SET completed_at = NULL")
    (dataset.path / "d/e").mkdir(parents=True)
    store = MemoryStore(objects={"kept": b"", "d": b"file"}, url="memory://s")
    assert tree(cache.sync(source_of(store, "")).path) == {"kept": b"", "d": b"file"}


def test_what_a_lost_record_named_goes_with_its_object(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    (dataset.path.parent / "record.db").write_bytes(b"rubbish" * 1000)
    (origin / "train/labels.csv").unlink()
    assert tree(cache.sync(source_of(store)).path) == tree(origin / "train")


@pytest.mark.parametrize("name", ["files", "parts"])
def test_a_link_in_place_of_a_folder_is_refused(cache: DataCache, store: Counting, tmp_path: Path, name: str) -> None:
    entry = Entry(tmp_path / "cache/data" / entry_name(source_of(store)))
    outside = tmp_path / "outside"
    write(outside / "precious", b"1")
    entry.folder.mkdir(parents=True)
    (entry.folder / name).symlink_to(outside)
    with pytest.raises(DataError, match="symbolic link") as caught:
        cache.sync(source_of(store))
    assert "remove the link" in caught.value.hint
    assert tree(outside) == {"precious": b"1"}


def test_records_of_earlier_versions_are_swept(cache: DataCache, store: Counting) -> None:
    dataset = cache.sync(source_of(store))
    for old in ("manifest.json", "progress.jsonl"):
        (dataset.path.parent / old).write_text("{}")
    cache.sync(source_of(store))
    assert sorted(path.name for path in dataset.path.parent.iterdir()) == ["files", "in-use", "lock", "record.db"]


def test_a_link_in_the_cache_leads_nothing_out(cache: DataCache, store: Counting, origin: Path, tmp_path: Path) -> None:
    dataset = cache.sync(source_of(store))
    outside = tmp_path / "outside"
    outside.mkdir()
    write(origin / "train/sub/new", b"x")
    (dataset.path / "sub").symlink_to(outside)
    with pytest.raises(DataError, match="leads out"):
        cache.sync(source_of(store))
    assert tree(outside) == {}


def test_a_foreign_folder_in_the_way_is_named(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    write(origin / "train/thing", b"x")
    write(dataset.path / "thing/theirs", b"precious")
    with pytest.raises(DataError, match="in the way"):
        cache.sync(source_of(store))
    assert (dataset.path / "thing/theirs").read_bytes() == b"precious"


# Keys that cannot be files


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/abs", "a//b", "a\nb", "n" * 256, "..", "a/.", "marker/", "fine/", "a\x00b"]
)
def test_odd_keys_are_left_out_and_named(cache: DataCache, tmp_path: Path, key: str) -> None:
    told: list[SyncProgress] = []
    store = MemoryStore(objects={key: b"1", "ok": b"x", "z/ok": b"y"})
    for fetched in (2, 0):
        dataset = cache.sync(Source("memory://", store), report=told.append)
        assert (dataset.files, dataset.fetched_files) == (2, fetched)
        assert dataset.left_out.count == 1
        assert dataset.left_out.named[0].key == key
        assert repr(key) in str(dataset.left_out)
        assert told[-1].left_out == dataset.left_out
    assert tree(dataset.path) == {"ok": b"x", "z/ok": b"y"}
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} == {"cache"}


def test_many_odd_keys_are_one_warning(cache: DataCache) -> None:
    store = MemoryStore(objects={f"a//{number}": b"" for number in range(50)} | {"ok": b""})
    left_out = cache.sync(Source("memory://", store)).left_out
    assert left_out.count == 50
    assert len(left_out.named) == 5
    assert str(left_out).endswith("'a//4' (an empty name in the path); and 45 more")


def test_odd_keys_alone_are_an_error(cache: DataCache) -> None:
    with pytest.raises(DataError, match=r"'\.\./x' \('\.' or '\.\.' in the path\)"):
        cache.sync(Source("memory://", MemoryStore(objects={"../x": b""})))


def test_what_is_odd_may_be_excluded(cache: DataCache) -> None:
    store = MemoryStore(objects={"x": b"1", "x/y": b"2", "a//b": b"3"})
    dataset = cache.sync(Source("memory://", store, exclude=("x/**", "a/**")))
    assert tree(dataset.path) == {"x": b"1"}
    assert dataset.left_out.count == 0


LONG = "/".join(["ü" * 127, "n" * 255, "o" * 255, "p" * 255])
"""1,022 bytes: with two more, the longest key that there can be."""


@pytest.mark.parametrize(
    "keys",
    [
        ["A.txt", "a.txt", "dir/x", "DIR/x"],
        ["caf\u00e9", "cafe\u0301"],
        [LONG + "/q", LONG + "/r"],
        ["..a", "a..", "...", "-rf", "~", "C:\\x", "a b", "%2e%2e", "\u202e", "x" * 255],
    ],
)
def test_harmless_keys_are_files(cache: DataCache, keys: list[str]) -> None:
    objects = {key: b"%d" % number for number, key in enumerate(keys)}
    dataset = cache.sync(Source("memory://", MemoryStore(objects=objects)))
    assert tree(dataset.path) == objects
    assert dataset.left_out.count == 0


CONTENDED = {"x": b"file", "x-1": b"-", "x/y": b"file too", "x/y/z": b"deep", "x0": b"0", "w/x": b"", "x/ok": b"ok"}


@pytest.mark.parametrize("keys", [sorted(CONTENDED), sorted(CONTENDED, reverse=True)])
def test_a_file_with_the_name_of_a_folder_is_left_out(cache: DataCache, keys: list[str]) -> None:
    store = MemoryStore(objects={key: CONTENDED[key] for key in keys})
    for fetched in (5, 0):
        dataset = cache.sync(Source("memory://", store))
        assert dataset.fetched_files == fetched
        assert {odd.key: odd.reason for odd in dataset.left_out.named} == {
            "x": "it would be a file where 'x/ok' needs a folder",
            "x/y": "it would be a file where 'x/y/z' needs a folder",
        }
    assert tree(dataset.path) == {key: CONTENDED[key] for key in ("x-1", "x/y/z", "x0", "w/x", "x/ok")}


def test_a_file_that_becomes_contended_gives_way(cache: DataCache) -> None:
    store = MemoryStore(objects={"x": b"file", "other": b""})
    assert cache.sync(Source("memory://s", store)).files == 2
    store.write("x/y", b"below")
    dataset = cache.sync(Source("memory://s", store))
    assert tree(dataset.path) == {"x/y": b"below", "other": b""}
    assert (dataset.files, dataset.fetched_files, dataset.left_out.count) == (2, 1, 1)
    store.delete(["x/y"])
    assert tree(cache.sync(Source("memory://s", store)).path) == {"x": b"file", "other": b""}


def test_markers_beside_files_are_nothing(cache: DataCache) -> None:
    store = MemoryStore(objects={"x/": b"", "x": b"file", "x/y/": b"", "z/": b""})
    dataset = cache.sync(Source("memory://", store))
    assert tree(dataset.path) == {"x": b"file"}
    assert (dataset.path / "z").is_dir()
    assert dataset.left_out.count == 0


# Sources that are not there


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        ("trian", "did you mean 'train'?"),
        ("train/0/x/y", "nearest place with objects is memory://s/train/0"),
        ("elsewhere", "nearest place with objects is memory://s: train"),
    ],
)
def test_a_source_without_objects_says_what_is_near(cache: DataCache, prefix: str, hint: str) -> None:
    store = MemoryStore(objects={"train/0/1": b""}, url="memory://s")
    with pytest.raises(DataError) as caught:
        cache.sync(source_of(store, prefix))
    assert hint in caught.value.hint


def test_an_empty_store_says_so(cache: DataCache) -> None:
    with pytest.raises(DataError) as caught:
        cache.sync(source_of(MemoryStore(), "a/b"))
    assert "holds nothing" in caught.value.hint


def test_a_selection_of_nothing_says_so(cache: DataCache, store: Counting) -> None:
    with pytest.raises(DataError, match="none of its 21 objects"):
        cache.sync(source_of(store, include=("*.jpg",)))


def test_a_source_that_emptied_does_not_empty_the_cache(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    before = tree(dataset.path)
    (origin / "train").rename(origin / "moved")
    with pytest.raises(DataError):
        cache.sync(source_of(store))
    assert tree(dataset.path) == before


def test_a_listing_that_breaks_off_removes_nothing(cache: DataCache) -> None:
    def broken_second_listing(operation: str, _key: str, nth: int) -> Fault | None:
        return Fault(StoreUnreachable("gone"), cut=1) if (operation, nth) == ("list", 1) else None

    store = MemoryStore(broken_second_listing, objects={"p/a": b"1", "p/b": b"2"})
    dataset = cache.sync(source_of(store, "p"))
    with pytest.raises(StoreUnreachable):
        cache.sync(source_of(store, "p"))
    assert tree(dataset.path) == {"a": b"1", "b": b"2"}
    assert cache.sync(source_of(store, "p")).fetched_files == 0


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "A.TGZ", "a.tar.zst", "a.zip"])
def test_archives_wait_for_another_version(cache: DataCache, tmp_path: Path, name: str) -> None:
    store = MemoryStore(objects={f"p/{name}": b"x", "p/plain": b"x"})
    with pytest.raises(NotYetError) as caught:
        cache.sync(source_of(store, "p"))
    assert "extract: never" in caught.value.hint
    assert not list((tmp_path / "cache").rglob("plain"))
    assert tree(cache.sync(source_of(store, "p", extract="never")).path).keys() == {name, "plain"}


# Trouble on the way


def test_an_object_that_changes_on_the_way_is_listed_again(cache: DataCache, origin: Path) -> None:
    changed = threading.Event()

    def change_once(key: str) -> None:
        if key == "train/labels.csv" and not changed.is_set():
            changed.set()
            (origin / key).write_bytes(b"longer than before\n")

    dataset = cache.sync(source_of(Counting(origin, change_once)))
    assert (dataset.path / "labels.csv").read_bytes() == b"longer than before\n"
    assert dataset.bytes == sum(map(len, tree(origin / "train").values()))
    assert cache.sync(source_of(FolderStore(origin))).fetched_files == 0


def test_an_object_that_is_replaced_by_a_large_one_comes_in_pieces(cache: DataCache, origin: Path) -> None:
    asked: list[int | None] = []

    class Growing(FolderStore):
        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            asked.append(at_most)
            write(origin / "new", b"x" * (3 << 20))
            (origin / "new").rename(origin / key)
            return super().look(key, at_most=at_most)

    dataset = cache.sync(source_of(Growing(origin), "train/labels.csv"))
    assert tree(dataset.path) == {"labels.csv": b"x" * (3 << 20)}
    assert asked == [1 << 20]


def test_an_object_that_never_rests_is_an_error(cache: DataCache, origin: Path) -> None:
    def change(key: str) -> None:
        if key == "train/labels.csv":
            with (origin / key).open("ab") as file:
                file.write(b"more")

    with pytest.raises(ObjectChanged, match=r"labels\.csv"):
        cache.sync(source_of(Counting(origin, change)))


def test_an_object_that_vanishes_is_an_error(cache: DataCache, origin: Path) -> None:
    def remove(key: str) -> None:
        if key == "train/labels.csv":
            (origin / key).unlink(missing_ok=True)

    with pytest.raises(ObjectMissing, match=r"labels\.csv"):
        cache.sync(source_of(Counting(origin, remove)))
    assert cache.sync(source_of(FolderStore(origin))).files == 20


@pytest.mark.parametrize("size", [5, 2 << 20])
def test_a_short_download_is_noticed(cache: DataCache, size: int) -> None:
    class Short(MemoryStore):
        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            data, version = super().look(key, at_most=at_most)
            return data[:3], version

        def download(self, key: str, target: Path, **more: Any) -> None:
            super().download(key, target, **more)
            os.truncate(target, 3)

    with pytest.raises(ObjectChanged, match=f"3 bytes arrived where {size}"):
        cache.sync(Source("memory://", Short(objects={"k": b"x" * size})))
    assert cache.entries() == []


def test_one_bad_file_ends_the_sync_and_the_rest_is_kept(cache: DataCache) -> None:
    objects = {f"k{number:02}": b"x" for number in range(40)}
    broken = True

    def plan(operation: str, key: str, _nth: int) -> Fault | None:
        return Fault(StoreUnreachable("server error")) if broken and (operation, key) == ("read", "k20") else None

    store = MemoryStore(plan, objects=objects)
    with pytest.raises(StoreUnreachable, match="k20: server error"):
        cache.sync(Source("memory://", store), workers=2)
    broken = False
    again = cache.sync(Source("memory://", store))
    assert 18 <= again.fetched_files <= 21
    assert tree(again.path) == objects


def test_several_errors_are_one(cache: DataCache) -> None:
    barrier = threading.Barrier(5)

    def all_fail(operation: str, key: str, _nth: int) -> Fault | None:
        if operation != "read":
            return None
        barrier.wait(10)
        return Fault(AccessDenied("no", "ask the owner") if key == "k4" else StoreUnreachable("down"))

    store = MemoryStore(all_fail, objects={f"k{number}": b"x" for number in range(5)})
    with pytest.raises(AccessDenied, match=r"could not bring k.*; k.*; k.*; and 2 more") as caught:
        cache.sync(Source("memory://", store), workers=5)
    assert caught.value.hint == "ask the owner"


def test_faults_of_ours_come_through_as_they_are(cache: DataCache) -> None:
    class Buggy(MemoryStore):
        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.sync(Source("memory://", Buggy(objects={"k": b"x"})))


def test_a_stop_is_quick_and_loses_nothing(cache: DataCache, store: Counting, origin: Path) -> None:
    stop = threading.Event()

    def stop_at_the_tenth(_key: str) -> None:
        if len(store.downloads) == 10:
            stop.set()

    store.before = stop_at_the_tenth
    with pytest.raises(SyncStopped):
        cache.sync(source_of(store), workers=1, stop=stop)
    assert len(store.downloads) == 10
    store.downloads.clear()
    assert cache.sync(source_of(store)).fetched_files == 11
    assert tree(cache.sync(source_of(store)).path) == tree(origin / "train")


def test_a_stop_ends_a_large_download_in_the_middle(cache: DataCache, tmp_path: Path) -> None:
    stop, moved = threading.Event(), list[int]()

    class Watched(MemoryStore):
        def download(self, key: str, target: Path, *, on_bytes: OnBytes = ignore_bytes, **more: Any) -> None:
            def count(size: int) -> None:
                moved.append(size)
                stop.set()
                on_bytes(size)

            super().download(key, target, on_bytes=count, **more)

    with pytest.raises(SyncStopped):
        cache.sync(Source("memory://", Watched(objects={"k": b"x" * (5 << 20)})), stop=stop)
    assert len(moved) == 1
    assert not list((tmp_path / "cache").rglob("parts/*"))


class Silent(MemoryStore):
    """Does not answer an operation below a prefix until it is told to; says when it is asked."""

    def __init__(self, operation: str, prefix: str, asked: Callable[[], object]) -> None:
        super().__init__(objects={"p/a": b"1", "p/b": b"2"}, url="memory://s")
        self.operation = operation
        self.prefix = prefix
        self.asked = asked
        self.answer = threading.Event()

    def wait(self, operation: str, key: str) -> None:
        if operation == self.operation and key.startswith(self.prefix):
            self.asked()
            assert self.answer.wait(60)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.wait("list", prefix)
        yield from super().list(prefix)

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        self.wait("look", key)
        return super().look(key, at_most=at_most)


@pytest.mark.parametrize(
    ("operation", "key"),
    [("list", "p/"), ("look", ""), ("look", "p/b")],
)
def test_a_stop_does_not_wait_for_a_store_that_is_silent(
    cache: DataCache, tmp_path: Path, operation: str, key: str
) -> None:
    stop = threading.Event()
    store = Silent(operation, key, stop.set)
    before = set(threading.enumerate())
    with pytest.raises(SyncStopped):
        cache.sync(source_of(store, "p"), stop=stop)
    late = set(threading.enumerate()) - before
    there = tree(tmp_path / "cache")
    store.answer.set()
    for thread in late:
        thread.join(60)
    assert tree(tmp_path / "cache") == there, "what comes too late changes nothing"
    assert tree(cache.sync(source_of(store, "p")).path) == {"a": b"1", "b": b"2"}


def test_a_stop_does_not_wait_for_a_look_at_what_is_near(cache: DataCache) -> None:
    stop, answer = threading.Event(), threading.Event()

    class Empty(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            if prefix == "":
                stop.set()
                assert answer.wait(60)
            return iter(())

    with pytest.raises(SyncStopped):
        cache.sync(source_of(Empty(), "p"), stop=stop)
    answer.set()


def test_a_stop_ends_the_search_for_a_single_object(cache: DataCache) -> None:
    stop = threading.Event()

    class Endless(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            if prefix == "tra":
                while True:
                    yield ObjectInfo("train/x", 1, "v", 0.0)
                    stop.set()

    before = set(threading.enumerate())
    with pytest.raises(SyncStopped):
        cache.sync(source_of(Endless(), "tra"), stop=stop)
    assert set(threading.enumerate()) <= before


def test_a_stop_ends_the_removal_of_what_has_gone(cache: DataCache) -> None:
    stop = threading.Event()
    store = MemoryStore(objects={f"{number:04}": b"" for number in range(5000)}, url="memory://s")
    dataset = cache.sync(source_of(store, ""))
    store.delete([f"{number:04}" for number in range(4999)])

    def stop_at_the_first() -> None:
        while (dataset.path / "0000").exists():
            time.sleep(0.001)
        stop.set()

    watching = threading.Thread(target=stop_at_the_first)
    watching.start()
    with pytest.raises(SyncStopped):
        cache.sync(source_of(store, ""), stop=stop)
    watching.join()
    assert 1000 < len(tree(dataset.path)) < 5000
    assert tree(cache.sync(source_of(store, "")).path) == {"4999": b""}


def test_a_failure_does_not_wait_for_what_takes_long(cache: DataCache) -> None:
    class Slow(MemoryStore):
        ended_by: BaseException | None = None

        def download(self, key: str, target: Path, *, on_bytes: OnBytes = ignore_bytes, **more: Any) -> None:
            try:
                for _ in range(600):
                    time.sleep(0.1)
                    on_bytes(0)
            except BaseException as error:
                self.ended_by = error
                raise

        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            raise AccessDenied("no")

    store = Slow(objects={"big": b"x" * (17 << 20), "small": b"1"})
    with pytest.raises(AccessDenied, match=r"could not bring small: no$"):
        cache.sync(Source("memory://", store))
    assert isinstance(store.ended_by, SyncStopped)


def test_few_of_many_folders_are_kept_in_mind(tmp_path: Path) -> None:
    places = Places(tmp_path / "files")
    for number in range(MADE_AT_MOST + 10):
        places.make(f"{tmp_path}/files/{number}")
    assert len(list((tmp_path / "files").iterdir())) == MADE_AT_MOST + 10
    assert len(places._made) == 10, "memory that would grow with the dataset"


class Panic(BaseException):
    """What a library written in another language raises."""


def test_what_is_more_than_an_exception_ends_the_sync_too(cache: DataCache) -> None:
    class Reading(MemoryStore):
        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            raise Panic("oh")

    class Listing(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            raise Panic("oh")

    for store in (Reading(objects={"k": b""}), Listing()):
        with pytest.raises(RuntimeError, match=r"Panic\('oh'\)"):
            cache.sync(Source("memory://", store))


def test_a_listener_that_raises_ends_the_sync_and_keeps_what_came(cache: DataCache, store: Counting) -> None:
    def interrupt(progress: SyncProgress) -> None:
        if progress.phase == "copying":
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        cache.sync(source_of(store), workers=1, report=interrupt)
    assert set(threading.enumerate()) <= before
    fetched = len(store.downloads)
    assert cache.sync(source_of(store)).fetched_files in (21 - fetched, 22 - fetched)


# Crashes and other processes

CHILD = """
import os, sys, time
from pathlib import Path
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.storage.folder import FolderStore

class Slow(FolderStore):
    def look(self, key, *, at_most=None):
        time.sleep(float(sys.argv[3]))
        with open(sys.argv[4], "a") as log:
            log.write(key + "\\n")
        return super().look(key, at_most=at_most)

def say(progress):
    print(progress.phase, flush=True)

store = Slow(Path(sys.argv[1]))
source = Source(f"{store.url}/train", store, "train")
DataCache(Path(sys.argv[2]), commit_every=0.02).sync(source, workers=2, report=say)
"""


def child(origin: Path, tmp_path: Path, delay: float) -> subprocess.Popen[str]:
    arguments = [str(origin), str(tmp_path / "cache"), str(delay), str(tmp_path / "log")]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_sync_that_was_killed_goes_on_where_it_was(cache: DataCache, store: Counting, tmp_path: Path) -> None:
    unfinished = Entry(tmp_path / "cache/data" / entry_name(source_of(store)))
    with child(Path(store.url.removeprefix("file://")), tmp_path, 0.05) as process:
        while unfinished.header().files < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    leftover = unfinished.parts / "leftover"
    leftover.write_bytes(b"half a file")
    [entry] = cache.entries()
    assert (entry.complete, entry.in_use, entry.source) == (False, False, source_of(store).url)
    assert 5 <= entry.files < 21
    dataset = cache.sync(source_of(store))
    assert len(store.downloads) == dataset.fetched_files == 21 - entry.files
    assert tree(dataset.path) == tree(Path(store.url.removeprefix("file://")) / "train")
    assert not leftover.exists()


def test_an_update_that_was_killed_does_not_leave_what_has_gone(
    cache: DataCache, store: Counting, origin: Path, tmp_path: Path
) -> None:
    dataset = cache.sync(source_of(store))
    (origin / "train/labels.csv").unlink()
    for number in range(20):
        (origin / f"train/{number % 3}/{number}.bin").write_bytes(b"new")
    with child(origin, tmp_path, 0.1) as process:
        while not lines(tmp_path / "log"):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not Entry(dataset.path.parent).is_complete()
    assert tree(cache.sync(source_of(store)).path) == tree(origin / "train")


def test_two_processes_fetch_each_file_once(origin: Path, tmp_path: Path) -> None:
    with child(origin, tmp_path, 0.02) as first, child(origin, tmp_path, 0.02) as second:
        outputs = [first.communicate(timeout=60)[0].split(), second.communicate(timeout=60)[0].split()]
    assert first.returncode == second.returncode == 0
    assert len(lines(tmp_path / "log")) == len(set(lines(tmp_path / "log"))) == 21
    assert sum("waiting" in output for output in outputs) == 1
    assert all(output[-1] == "done" for output in outputs)


def test_two_threads_fetch_each_file_once(cache: DataCache, store: Counting) -> None:
    threads = [threading.Thread(target=cache.sync, args=(source_of(store),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.downloads) == 21


def test_waiting_for_another_process_can_be_stopped(cache: DataCache, store: Counting, tmp_path: Path) -> None:
    stop = threading.Event()
    with child(Path(store.url.removeprefix("file://")), tmp_path, 30) as process:
        assert process.stdout
        assert process.stdout.readline() == "listing\n"
        with pytest.raises(SyncStopped):
            cache.sync(source_of(store), stop=stop, report=lambda _: stop.set())
        process.kill()


# Full disks


def big(count: int, size: int, url: str = "memory://big") -> Source:
    objects = {f"k{number}": bytes([number % 256]) * size for number in range(count)}
    return Source(url, MemoryStore(objects=objects))


@pytest.mark.root
def test_a_disk_that_is_too_small_is_noticed_before(mount: Callable[[str], Path]) -> None:
    disk = mount("size=2m")
    with pytest.raises(DiskFull) as caught:
        DataCache(disk).sync(big(5, 1 << 20))
    assert "needs 5 MiB" in caught.value.message
    assert f"free on {disk}, 3" in caught.value.message
    assert "missing" in caught.value.message
    assert caught.value.hint
    assert not list(disk.rglob("k*"))


@pytest.mark.root
def test_many_small_files_need_whole_blocks(mount: Callable[[str], Path]) -> None:
    with pytest.raises(DiskFull, match=r"needs 3\.9 MiB"):
        DataCache(mount("size=2m")).sync(big(1000, 1))


@pytest.mark.root
def test_more_files_than_the_disk_can_hold(mount: Callable[[str], Path]) -> None:
    with pytest.raises(DiskFull, match="needs 200 files"):
        DataCache(mount("size=2m,nr_inodes=100")).sync(big(200, 1))


@pytest.mark.root
def test_a_disk_that_fills_on_the_way_keeps_what_came(mount: Callable[[str], Path], tmp_path: Path) -> None:
    disk = mount("size=4m")
    ballast = disk / "ballast"
    started: list[str] = []

    def fill_at_the_third(key: str) -> None:
        started.append(key)
        if len(started) == 3:
            fill_disk(ballast)

    origin = tmp_path / "large"
    for number in range(5):
        write(origin / f"k{number}", bytes([number]) * 500_000)
    cache = DataCache(disk)
    with pytest.raises(DiskFull, match=r"needs 1\.4 MiB, 256 KiB free") as caught:
        cache.sync(source_of(Counting(origin, fill_at_the_third), ""), workers=1)
    assert "kept" in caught.value.hint
    assert not list(disk.rglob("parts/*"))
    ballast.unlink()
    again = cache.sync(source_of(FolderStore(origin), ""))
    assert (again.files, again.fetched_files) == (5, 3)


def fill_disk(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", 0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.root
def test_a_full_disk_needs_no_room_for_no_work(mount: Callable[[str], Path]) -> None:
    disk = mount("size=40m")
    fill_disk(disk / "ballast")
    os.truncate(disk / "ballast", 39 << 20)
    assert DataCache(disk).sync(big(100, 1)).fetched_files == 100
    fill_disk(disk / "more")
    os.truncate(disk / "more", max(0, (disk / "more").stat().st_size - (200 << 10)))
    assert DataCache(disk).sync(big(100, 1)).fetched_files == 0


@pytest.mark.root
def test_room_for_the_listing_is_made(mount: Callable[[str], Path]) -> None:
    disk = mount("size=40m")
    cache = DataCache(disk)
    cache.sync(big(1, 8 << 20, "memory://old"))
    cache.sync(big(3000, 1, "memory://s"))
    fill_disk(disk / "ballast")
    assert cache.sync(big(3000, 1, "memory://s")).fetched_files == 0
    assert [entry.source for entry in cache.entries()] == ["memory://s"]
    fill_disk(disk / "more")
    with pytest.raises(DiskFull) as caught:
        cache.sync(big(3000, 1, "memory://s"))
    assert "free some space" in caught.value.hint
    assert cache.entries()[0].complete


@pytest.mark.root
def test_a_source_that_shrinks_gives_room_on_a_full_disk(mount: Callable[[str], Path]) -> None:
    disk = mount("size=40m")
    store = MemoryStore(objects={"a": b"x" * (8 << 20), "b": b"1"}, url="memory://s")
    DataCache(disk).sync(source_of(store, ""))
    fill_disk(disk / "ballast")
    os.truncate(disk / "ballast", (disk / "ballast").stat().st_size - (120 << 10))
    store.delete(["a"])
    assert tree(DataCache(disk).sync(source_of(store, "")).path) == {"b": b"1"}


@pytest.mark.root
def test_a_read_only_cache_says_so(mount: Callable[[str], Path], store: Counting) -> None:
    disk = mount("size=2m,ro")
    with pytest.raises(AccessDenied):
        DataCache(disk).sync(source_of(store))
