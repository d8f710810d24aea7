"""The cache as a whole: entries, use, eviction, limits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.dataset.cache import DataCache, entry_name
from runner.dataset.fetch import SyncStopped
from runner.dataset.record import Entry, Header, Record
from runner.dataset.source import Source
from runner.dataset.sync import Dataset
from runner.errors import AccessDenied, DataError, DiskFull
from runner.files import locked
from runner.storage.memory import MemoryStore

KIB = 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def source(name: str, size: int = 100 * KIB) -> Source:
    return Source(f"memory://bucket/{name}", MemoryStore(objects={"file": b"x" * size}))


def fill(cache: DataCache, *names: str, size: int = 100 * KIB) -> list[Dataset]:
    """Datasets that were last used in the order of their names."""
    datasets = [cache.sync(source(name, size)) for name in names]
    for age, dataset in enumerate(reversed(datasets)):
        when = 1_700_000_000 - age * 1000
        os.utime(dataset.path.parent / "in-use", (when, when))
    return datasets


def names(cache: DataCache) -> list[str]:
    return [entry.source.rpartition("/")[2] for entry in cache.entries()]


HOLDER = """
import sys
from pathlib import Path
from runner.dataset.cache import DataCache
from runner.dataset.sync import Dataset
with DataCache(Path(sys.argv[1])).use(Dataset(Path(sys.argv[2]), 1, 1, 0, 0, 0.0)):
    print("holding", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another_process(root: Path, dataset: Dataset) -> Iterator[None]:
    command = [sys.executable, "-c", HOLDER, str(root), str(dataset.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "holding\n"
        yield
        process.kill()


def test_entries_tell_what_is_there(root: Path) -> None:
    cache = DataCache(root)
    assert cache.entries() == []
    old, new = fill(cache, "old", "new")
    first, second = cache.entries()
    assert (first.source, first.path) == ("memory://bucket/old", old.path.parent)
    assert (first.bytes, first.files, first.complete, first.in_use) == (100 * KIB, 1, True, False)
    assert (first.last_used, second.last_used) == (1_699_999_000, 1_700_000_000)
    assert second.path == new.path.parent


@pytest.mark.parametrize(
    ("url", "start"),
    [
        ("s3://bucket/data/train/", "train-"),
        ("s3://bucket", "bucket-"),
        ("s3://bucket/we ird/näme*", "n-me-"),
        ("s3://bucket/..", "data-"),
        ("s3://bucket/" + "x" * 200, "x" * 40 + "-"),
    ],
)
def test_names_are_readable_and_safe(url: str, start: str) -> None:
    name = entry_name(Source(url, MemoryStore()))
    assert name.startswith(start)
    assert len(name) == len(start) + 12
    assert name == entry_name(Source(url.rstrip("/"), MemoryStore()))
    assert name != entry_name(Source(url, MemoryStore(), include=("*",)))


def test_use_is_seen_and_noted(root: Path) -> None:
    cache = DataCache(root)
    [dataset] = fill(cache, "a")
    with cache.use(dataset) as path:
        assert path == dataset.path
        [entry] = cache.entries()
        assert entry.in_use
        assert entry.last_used > 1_700_000_000
    assert not cache.entries()[0].in_use


def test_many_may_use_one_dataset(root: Path) -> None:
    cache = DataCache(root)
    [dataset] = fill(cache, "a")
    with cache.use(dataset), cache.use(dataset), held_by_another_process(root, dataset):
        assert cache.clear().removed == ()
    assert len(cache.clear().removed) == 1


def test_a_dataset_that_was_evicted_cannot_be_used(root: Path) -> None:
    cache = DataCache(root)
    [dataset] = fill(cache, "a")
    cache.clear()
    with pytest.raises(DataError), cache.use(dataset):
        pass


def test_clear_takes_names_and_urls(root: Path) -> None:
    cache = DataCache(root)
    a, _b, _c = fill(cache, "a", "b", "c")
    done = cache.clear([a.path.parent.name, "memory://bucket/b"])
    assert [entry.source[-1] for entry in done.removed] == ["a", "b"]
    assert names(cache) == ["c"]
    with pytest.raises(DataError, match="nonsense"):
        cache.clear(["nonsense"])
    cache.clear()
    assert sorted(path.name for path in (root / "data").iterdir()) == [".lock"]


def test_the_least_recently_used_goes_first(root: Path) -> None:
    cache = DataCache(root, limit=350 * KIB)
    fill(cache, "a", "b", "c")
    assert cache.make_room(50 * KIB) == 0
    assert 200 * KIB <= cache.make_room(200 * KIB) < 300 * KIB
    assert names(cache) == ["c"]


def test_room_is_made_as_far_as_possible(root: Path) -> None:
    cache = DataCache(root, limit=350 * KIB)
    a, _b = fill(cache, "a", "b")
    with held_by_another_process(root, a):
        assert 100 * KIB <= cache.make_room(1 << 40) < 200 * KIB
        assert names(cache) == ["a"]


def test_a_sync_evicts_what_nobody_uses(root: Path) -> None:
    cache = DataCache(root, limit=350 * KIB)
    a, _b, _c = fill(cache, "a", "b", "c")
    with held_by_another_process(root, a):
        cache.sync(source("d", 120 * KIB))
        assert names(cache) == ["c", "a", "d"]


def test_nothing_is_evicted_when_it_would_not_help(root: Path) -> None:
    cache = DataCache(root, limit=350 * KIB)
    a, _b, _c = fill(cache, "a", "b", "c")
    with held_by_another_process(root, a), pytest.raises(DiskFull, match="needs 300 KiB, 50 KiB free within the limit"):
        cache.sync(source("d", 300 * KIB))
    assert len([entry for entry in cache.entries() if entry.complete]) == 3


def test_incomplete_entries_are_evicted_too(root: Path) -> None:
    cache = DataCache(root, limit=250 * KIB)
    [dataset] = fill(cache, "a")
    with Record(Entry(dataset.path.parent), Header("")) as record:
        record.reopen()
    cache.sync(source("b", 200 * KIB))
    assert cache.make_room(250 * KIB) >= 200 * KIB
    assert names(cache) == []


def test_what_is_there_already_needs_no_room(root: Path) -> None:
    fill(DataCache(root), "a", "b")
    cache = DataCache(root, limit=50 * KIB)
    assert cache.sync(source("a")).fetched_files == 0
    assert names(cache) == ["b", "a"]


def test_an_update_may_use_the_room_of_what_it_replaces(root: Path) -> None:
    cache = DataCache(root, limit=150 * KIB)
    store = MemoryStore(objects={"file": b"x" * 100 * KIB})
    cache.sync(Source("memory://s", store))
    store.write("file", b"y" * 140 * KIB)
    assert cache.sync(Source("memory://s", store)).bytes == 140 * KIB


def test_two_that_are_filled_at_once_stay_within_the_limit(root: Path) -> None:
    """The second finds that the first is going to need what is free, though it has not come yet."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            begun.set()
            assert go_on.wait(60)
            return super().look(key, at_most=at_most)

    cache = DataCache(root, limit=350 * KIB)
    slow = Source("memory://bucket/slow", Slow(objects={"file": b"x" * 200 * KIB}))
    filling = threading.Thread(target=cache.sync, args=(slow,))
    filling.start()
    assert begun.wait(60)
    with pytest.raises(DiskFull, match="needs 200 KiB, 150 KiB free within the limit"):
        DataCache(root, limit=350 * KIB).sync(source("other", 200 * KIB))
    assert cache.sync(source("small", 100 * KIB)).bytes == 100 * KIB
    go_on.set()
    filling.join()
    assert {entry.source: entry.bytes for entry in cache.entries() if entry.complete} == {
        "memory://bucket/slow": 200 * KIB,
        "memory://bucket/small": 100 * KIB,
    }
    assert not list(root.rglob("claim"))


def test_a_claim_of_a_dead_process_counts_nothing(root: Path) -> None:
    cache = DataCache(root, limit=350 * KIB)
    [dataset] = fill(cache, "a")
    Entry(dataset.path.parent).claim.write_text(str(300 * KIB))
    assert cache.sync(source("b", 200 * KIB)).bytes == 200 * KIB
    assert names(cache) == ["a", "b"]


def test_what_is_being_brought_up_to_date_is_waited_for(root: Path) -> None:
    begun, go_on, stop = threading.Event(), threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
            if begun.is_set():
                assert go_on.wait(60)
            return super().look(key, at_most=at_most)

    store = Slow(objects={"file": b"old"})
    cache = DataCache(root)
    dataset = cache.sync(Source("memory://s", store))
    store.write("file", b"newer")
    begun.set()
    updating = threading.Thread(target=cache.sync, args=(Source("memory://s", store),))
    updating.start()
    while Entry(dataset.path.parent).is_complete():
        time.sleep(0.01)
    stop.set()
    with pytest.raises(SyncStopped), cache.use(dataset, stop=stop):
        pass
    threading.Timer(0.3, go_on.set).start()
    with cache.use(dataset) as path:
        assert (path / "file").read_bytes() == b"newer"
    updating.join()


def test_what_a_dead_process_threw_away_goes(root: Path) -> None:
    trash = root / "data/.trash-1234"
    trash.mkdir(parents=True)
    (trash / "file").write_bytes(b"x")
    cache = DataCache(root)
    assert cache.entries() == []
    fill(cache, "a")
    assert not trash.exists()


def test_syncing_using_and_clearing_at_once(root: Path) -> None:
    cache = DataCache(root)
    stop = threading.Event()
    evicted = 0

    def keep_clearing() -> None:
        nonlocal evicted
        while not stop.is_set():
            evicted += len(cache.clear().removed)

    clearing = threading.Thread(target=keep_clearing)
    clearing.start()
    used = 0
    for _ in range(60):
        dataset = cache.sync(source("a", 10))
        try:
            with cache.use(dataset) as path:
                assert (path / "file").read_bytes() == b"x" * 10
                used += 1
        except DataError:
            continue
    stop.set()
    clearing.join()
    assert used + evicted >= 60
    assert sorted(path.name for path in (root / "data").iterdir() if path.name.startswith(".")) == [".lock"]


@pytest.mark.root
def test_a_full_disk_makes_room_by_itself(mount: Callable[[str], Path]) -> None:
    disk = mount("size=2m")
    cache = DataCache(disk)
    a, _b = fill(cache, "a", "b", size=600 * KIB)
    with held_by_another_process(disk, a):
        cache.sync(source("c", 1000 * KIB))
        assert names(cache) == ["a", "c"]
        with pytest.raises(DiskFull, match=r"needs 1.8 MiB, .* free on .* missing"):
            cache.sync(source("d", 1800 * KIB))
        assert {entry.source[-1] for entry in cache.entries() if entry.complete} == {"a", "c"}


@pytest.mark.root
def test_what_a_dead_sync_left_is_room(mount: Callable[[str], Path]) -> None:
    cache = DataCache(mount("size=20m"))
    [dead] = fill(cache, "dead", size=0)
    entry = Entry(dead.path.parent)
    with Record(entry, Header("")) as record:
        record.reopen()
    (entry.parts / "x").write_bytes(b"x" * (14 << 20))
    cache.sync(source("new", 10 << 20))
    assert names(cache) == ["new"]


@pytest.mark.root
def test_tiny_files_give_back_whole_blocks(mount: Callable[[str], Path]) -> None:
    cache = DataCache(mount("size=12m"))
    cache.sync(Source("memory://tiny", MemoryStore(objects={f"{number}": b"v" for number in range(1500)})))
    cache.sync(source("new", 8 << 20))
    assert names(cache) == ["new"]


@pytest.mark.root
def test_files_are_room_too(mount: Callable[[str], Path]) -> None:
    disk = mount("size=20m,nr_inodes=200")
    cache = DataCache(disk)

    def many(name: str, count: int) -> Source:
        return Source(f"memory://{name}", MemoryStore(objects={f"{number}": b"v" for number in range(count)}))

    cache.sync(many("a", 100))
    cache.sync(many("b", 120))
    assert [entry.source for entry in cache.entries()] == ["memory://b"]
    with pytest.raises(DiskFull, match="needs 300 files"):
        cache.sync(many("c", 300))
    assert [entry.source for entry in cache.entries() if entry.complete] == ["memory://b"]


class Failing(MemoryStore):
    """Lists what there is, and gives none of it; or, with ``gives``, only that."""

    gives: frozenset[str] = frozenset()

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        if key not in self.gives:
            raise AccessDenied(f"{key}: no")
        return super().look(key, at_most=at_most)


def test_a_first_sync_to_which_nothing_came_leaves_no_entry(root: Path) -> None:
    cache = DataCache(root)
    for nothing in (MemoryStore(), Failing(objects={"file": b"x"})):
        with pytest.raises((DataError, AccessDenied)):
            cache.sync(Source("memory://s", nothing))
        assert cache.entries() == []
    assert sorted(path.name for path in (root / "data").iterdir()) == [".lock"]


def test_what_came_of_a_sync_that_failed_is_there_and_incomplete(root: Path) -> None:
    store = Failing(objects={"good": b"x", "refused": b"y"})
    store.gives = frozenset({"good"})
    cache = DataCache(root)
    with pytest.raises(AccessDenied):
        cache.sync(Source("memory://s", store), workers=1)
    (entry,) = cache.entries()
    assert (entry.source, entry.complete, entry.files, entry.bytes) == ("memory://s", False, 1, 1)
    store.gives = frozenset({"good", "refused"})
    assert cache.sync(Source("memory://s", store)).fetched_files == 1


def test_a_sync_that_fails_later_takes_nothing_away(root: Path) -> None:
    store = MemoryStore(objects={"file": b"x"})
    cache = DataCache(root)
    cache.sync(Source("memory://s", store))
    with pytest.raises(DataError):
        cache.sync(Source("memory://s", MemoryStore()))
    (entry,) = cache.entries()
    assert (entry.complete, entry.files) == (True, 1)


def test_the_void_entry_of_one_that_waits_in_vain_stays_with_who_fills_it(root: Path) -> None:
    """Whoever is told to stop waiting must not take away what another process is about to fill."""
    cache, stop = DataCache(root), threading.Event()
    stop.set()
    entry = Entry(root / "data" / entry_name(source("a")))
    with locked(entry.lock):
        with pytest.raises(SyncStopped):
            cache.sync(source("a"), stop=stop)
        assert entry.exists()
