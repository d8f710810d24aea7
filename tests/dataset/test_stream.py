"""Long listings: files come meanwhile, memory stays small, and what turns out at the end is put right."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner.core.diff import Wanted
from runner.dataset.cache import DataCache, entry_name
from runner.dataset.fetch import SyncStopped
from runner.dataset.leftovers import part_name
from runner.dataset.record import Entry
from runner.dataset.source import Source
from runner.dataset.sync import SyncProgress
from runner.errors import DiskFull, NotYetError, StoreUnreachable
from runner.storage.api import ObjectInfo, OnBytes, ignore_bytes
from runner.storage.memory import MemoryStore

PAGES = {f"k{number:05}": b"%d" % number for number in range(2500)}


class Listed(MemoryStore):
    """Tells of its objects in the order in which they were put; before some of them, something is waited for."""

    def __init__(self, objects: dict[str, bytes], before: dict[str, Callable[[], object]] | None = None) -> None:
        super().__init__(objects=objects, url="memory://s")
        self.before = before or {}
        self.fetched: dict[str, threading.Event] = {key: threading.Event() for key in objects}

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            if wait := self.before.get(info.key):
                wait()
            yield info

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        self.fetched[key].set()
        return super().look(key, at_most=at_most)


def until_fetched(store: Listed, key: str) -> Callable[[], None]:
    def wait() -> None:
        assert store.fetched[key].wait(60), f"{key} does not come while the listing goes on"

    return wait


@pytest.fixture
def cache(tmp_path: Path) -> DataCache:
    return DataCache(tmp_path / "cache")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_come_while_the_listing_goes_on(cache: DataCache) -> None:
    store = Listed(PAGES)
    store.before = {"k02400": until_fetched(store, "k00000")}
    told: list[SyncProgress] = []
    dataset = cache.sync(Source("memory://s", store), report=told.append)
    assert tree(dataset.path) == PAGES
    assert (dataset.files, dataset.fetched_files) == (2500, 2500)
    assert told[-1].phase == "done"


def test_a_short_listing_is_looked_at_as_a_whole_first(cache: DataCache) -> None:
    objects = dict(list(PAGES.items())[:999]) | {"late.tar": b""}
    store = Listed(objects)
    with pytest.raises(NotYetError):
        cache.sync(Source("memory://s", store))
    assert not any(fetched.is_set() for fetched in store.fetched.values())


def test_a_listing_that_breaks_off_keeps_what_came_and_removes_nothing(cache: DataCache) -> None:
    known = Listed({"gone": b"", "also gone": b""})
    dataset = cache.sync(Source("memory://s", known))
    store = Listed(PAGES)

    def fail() -> None:
        until_fetched(store, "k00900")()
        raise StoreUnreachable("the listing broke off")

    store.before = {"k02400": fail}
    with pytest.raises(StoreUnreachable, match="broke off"):
        cache.sync(Source("memory://s", store))
    there = tree(dataset.path)
    assert there.keys() >= {"gone", "also gone", "k00900"}
    assert not Entry(dataset.path.parent).is_complete()
    store.before = {}
    again = cache.sync(Source("memory://s", store))
    assert again.fetched_files == 2500 - (len(there) - 2)
    assert tree(dataset.path) == PAGES


def test_a_stop_while_listing_is_quick(cache: DataCache) -> None:
    stop = threading.Event()
    store = Listed(PAGES, {"k01200": stop.set})
    with pytest.raises(SyncStopped):
        cache.sync(Source("memory://s", store), stop=stop)


def test_a_stop_is_seen_while_pages_keep_coming(cache: DataCache) -> None:
    stop = threading.Event()
    listed = 0

    class Fast(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            nonlocal listed
            for listed in range(300_000):
                if listed == 5000:
                    stop.set()
                yield ObjectInfo(f"{listed:06}", 1, "v", 0.0)

    with pytest.raises(SyncStopped):
        cache.sync(Source("memory://s", Fast()), stop=stop)
    assert listed < 100_000


def test_while_files_may_be_there_that_no_record_names_none_is_brought(cache: DataCache) -> None:
    many = {f"k{number:05}": b"%d" % number for number in range(6000)}
    entry = Entry(cache.sync(Source("memory://s", Listed({"x": b"", "w": b""}))).path.parent)
    with closing(sqlite3.connect(entry.record)) as database, database:
        database.execute("UPDATE header SET completed_at = NULL")
        database.execute("DELETE FROM file WHERE path = 'x'")
    store = Listed({"x/y": b"", **many})
    early: list[bool] = []
    store.before = {"k05999": lambda: early.append(any(store.fetched[key].wait(1) for key in ("x/y", "k00000")))}
    assert tree(cache.sync(Source("memory://s", store)).path) == {"x/y": b"", **many}
    assert early == [False]


def test_a_file_that_came_too_early_gives_way_to_a_folder(cache: DataCache) -> None:
    store = Listed({"x": b"file", **PAGES, "x/y": b"below"})
    store.before = {"x/y": until_fetched(store, "x")}
    dataset = cache.sync(Source("memory://s", store))
    assert tree(dataset.path) == {**PAGES, "x/y": b"below"}
    assert [odd.key for odd in dataset.left_out.named] == ["x"]
    assert (dataset.files, dataset.bytes) == (2501, sum(map(len, PAGES.values())) + 5)
    assert cache.sync(Source("memory://s", store)).fetched_files == 0


def test_a_folder_whose_files_are_gone_makes_room_for_a_file_of_its_name(cache: DataCache) -> None:
    cache.sync(Source("memory://s", Listed({"x/y": b"", "x/z/deep": b""})))
    store = Listed({"x": b"file", **PAGES})
    assert tree(cache.sync(Source("memory://s", store)).path) == {"x": b"file", **PAGES}


def test_a_key_that_is_listed_twice_counts_once(cache: DataCache) -> None:
    class Twice(Listed):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            yield from super().list(prefix)
            yield from super().list(prefix)

    dataset = cache.sync(Source("memory://s", Twice(PAGES)))
    assert (dataset.files, dataset.fetched_files) == (2500, 2500)


def test_an_order_of_its_own_is_no_trouble(cache: DataCache) -> None:
    store = Listed(dict(sorted(PAGES.items(), key=lambda item: hash(item[0]))))
    cache.sync(Source("memory://s", store))
    for number in range(0, 2500, 7):
        store.delete([f"k{number:05}"])
    dataset = cache.sync(Source("memory://s", store))
    assert dataset.fetched_files == 0
    assert tree(dataset.path) == {key: data for number, (key, data) in enumerate(PAGES.items()) if number % 7}


# Room


KIB = {key: data.ljust(1024) for key, data in PAGES.items()}


def test_room_is_made_once_it_is_known_that_it_helps(tmp_path: Path) -> None:
    cache = DataCache(tmp_path / "cache", limit=3 << 20)
    old = cache.sync(Source("memory://old", MemoryStore(objects={"old": b"x" * (3 << 19)})))
    assert tree(cache.sync(Source("memory://s", Listed(KIB))).path) == KIB
    assert not old.path.exists()


def test_nothing_is_evicted_when_it_turns_out_that_it_does_not_help(tmp_path: Path) -> None:
    cache = DataCache(tmp_path / "cache", limit=2 << 20)
    old = cache.sync(Source("memory://old", MemoryStore(objects={"old": b"x" * (1 << 19)})))
    with pytest.raises(DiskFull, match="missing"):
        cache.sync(Source("memory://s", Listed(KIB)))
    assert (old.path / "old").exists()


# Going on inside a file


class Resuming(MemoryStore):
    """Notes how far a download is, as stores of large objects do."""

    def __init__(self, objects: dict[str, bytes], stop_at: int) -> None:
        super().__init__(objects=objects, url="memory://s")
        self.stop_at = stop_at
        self.moved = 0

    def download(
        self, key: str, target: Path, *, on_bytes: OnBytes = ignore_bytes, note: Path | None = None, **more: Any
    ) -> None:
        assert note
        data, step = self.read(key), 1 << 20
        begin = int(note.read_text()) if note.exists() else 0
        with open(target, "r+b" if begin else "wb") as file:
            file.seek(begin)
            for at in range(begin, len(data), step):
                if self.moved >= self.stop_at:
                    raise StoreUnreachable("cut")
                self.moved += file.write(data[at : at + step])
                file.flush()
                note.write_text(str(at + step))
                on_bytes(step)
        note.unlink()


def test_a_sync_goes_on_inside_a_large_file(cache: DataCache, tmp_path: Path) -> None:
    store = Resuming({"big": os.urandom(6 << 20)}, stop_at=4 << 20)
    with pytest.raises(StoreUnreachable):
        cache.sync(Source("memory://s", store))
    parts = [path.name for path in (tmp_path / "cache").rglob("parts/*")]
    assert len(parts) == 2
    store.stop_at = 100 << 20
    dataset = cache.sync(Source("memory://s", store))
    assert store.moved == 6 << 20
    assert tree(dataset.path) == {"big": store.read("big")}
    assert sorted(path.name for path in dataset.path.parent.iterdir()) == ["files", "in-use", "lock", "record.db"]


def test_parts_of_what_nobody_wants_any_more_go(cache: DataCache) -> None:
    store = Resuming({"big": os.urandom(6 << 20), "other": os.urandom(6 << 20)}, stop_at=4 << 20)
    with pytest.raises(StoreUnreachable):
        cache.sync(Source("memory://s", store), workers=1)
    entry = Entry(cache.entries()[0].path)
    store.write("big", os.urandom(6 << 20))
    store.stop_at = 4 << 20
    with pytest.raises(StoreUnreachable):
        cache.sync(Source("memory://s", store), workers=1)
    assert not entry.exists(), "the part was all that there was"
    store.stop_at = 100 << 20
    assert tree(cache.sync(Source("memory://s", store)).path) == {key: store.read(key) for key in ("big", "other")}


def test_a_part_without_a_note_is_begun_again_and_let_alone(cache: DataCache, tmp_path: Path) -> None:
    settled = threading.Event()

    class Slow(Listed):
        def download(self, key: str, target: Path, **more: Any) -> None:
            MemoryStore.download(self, key, target, **more)
            begun.set()
            assert settled.wait(60)

    begun = threading.Event()
    objects = {"a-big": b"x" * (2 << 20), **PAGES}
    store = Slow(objects)
    store.before = {"k02400": lambda: begun.wait(60)}
    source = Source("memory://s", store)
    entry = Entry(tmp_path / "cache/data" / entry_name(source))
    big = next(store.list())
    entry.parts.mkdir(parents=True)
    (entry.parts / part_name(Wanted("a-big", "a-big", big.size, big.version))).write_bytes(b"half")

    def report(progress: SyncProgress) -> None:
        if progress.complete:
            settled.set()

    assert tree(cache.sync(source, report=report).path) == objects


def test_the_name_of_a_part_tells_versions_apart() -> None:
    names = {part_name(Wanted("p", key, 1, version)) for key in ("a", "b") for version in ("1", "2")}
    assert len(names) == 4
    assert part_name(Wanted("p", "a", 1, "1")) == part_name(Wanted("q", "a", 2, "1"))


# A million keys

MILLION = """
import re, sys, time
from pathlib import Path
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.storage.api import ObjectInfo
from runner.storage.memory import MemoryStore

class Endless(MemoryStore):
    def list(self, prefix=""):
        for number in range(int(sys.argv[2])):
            yield ObjectInfo(f"train/{number % 1000:04}/image-{number:012}.jpeg", 4, f"{number:032x}", 0.0)
    def look(self, key, *, at_most=None):
        return b"data", f"{int(key[-17:-5]):032x}"

source = Source("memory://s", Endless(), "train", include=tuple(sys.argv[3:]))
for _ in range(2):
    started = time.monotonic()
    dataset = DataCache(Path(sys.argv[1])).sync(source)
    # Not what getrusage says: that counts what the parent had before this program began.
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
    print(dataset.files, dataset.fetched_files, peak, f"{time.monotonic() - started:.1f}", flush=True)
"""


def keys_synced(cache: Path, count: int, *include: str) -> list[list[str]]:
    """For a sync and another: files, files fetched, peak of memory in MiB, seconds."""
    command = [sys.executable, "-c", MILLION, str(cache), str(count), *include]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_memory_does_not_grow_with_the_listing(tmp_path: Path) -> None:
    few = keys_synced(tmp_path / "few", 2_000, "*0000.jpeg")
    many = keys_synced(tmp_path / "many", 60_000, "*0000.jpeg")
    assert many[1][:2] == ["6", "0"]
    assert int(many[1][2]) < int(few[1][2]) + 16


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "include"), [(1_000_000, ("*000.jpeg",)), (200_000, ())])
def test_a_million_keys_and_many_files_in_little_memory(tmp_path: Path, count: int, include: tuple[str, ...]) -> None:
    first, second = keys_synced(tmp_path / "cache", count, *include)
    print(f"\n{count} keys, {first[0]} wanted: {first[2]} MiB, {first[3]} s; again: {second[2]} MiB, {second[3]} s")
    assert int(first[0]) == int(second[0]) == (count // 1000 if include else count)
    assert int(second[1]) == 0
    assert int(second[2]) < 80
