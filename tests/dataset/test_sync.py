"""Bringing a source into the cache: what is fetched, what is not, and what survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from crc32c import crc32c

from runner.dataset.cache import DataCache, entry_name
from runner.dataset.fetch import SyncStopped
from runner.dataset.source import Source
from runner.dataset.sync import Dataset, SyncProgress
from runner.errors import AccessDenied, DataError, DiskFull, NotYetError, ObjectChanged, ObjectMissing, StoreUnreachable
from runner.storage.api import ObjectStore, OnBytes, ignore_bytes
from runner.storage.folder import FolderStore
from runner.storage.memory import Fault, MemoryStore


class Counting(FolderStore):
    """A folder that remembers what was downloaded, and can do something before each download."""

    def __init__(self, root: Path, before: Callable[[str], None] = lambda _key: None) -> None:
        super().__init__(root)
        self.downloads: list[str] = []
        self.before = before

    def download(self, key: str, target: Path, *, version: str | None = None, on_bytes: OnBytes = ignore_bytes) -> None:
        self.downloads.append(key)
        self.before(key)
        super().download(key, target, version=version, on_bytes=on_bytes)


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


def manifest_of(dataset: Dataset) -> dict[str, object]:
    data = json.loads((dataset.path.parent / "manifest.json").read_bytes())
    assert isinstance(data, dict)
    return data


# The normal course


def test_a_first_sync_brings_everything(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    assert tree(dataset.path) == tree(origin / "train")
    assert (dataset.files, dataset.fetched_files) == (21, 21)
    assert dataset.bytes == dataset.fetched_bytes == sum(map(len, tree(origin / "train").values()))
    assert sorted(path.name for path in dataset.path.parent.iterdir()) == ["files", "in-use", "lock", "manifest.json"]


def test_the_manifest_tells_all(cache: DataCache, store: Counting) -> None:
    dataset = cache.sync(source_of(store, include=("*.csv",)))
    data = manifest_of(dataset)
    info = next(store.list("train/labels.csv"))
    assert (data["source"], data["include"], data["exclude"], data["count"]) == (
        f"{store.url}/train",
        ["*.csv"],
        [],
        1,
    )
    assert data["files"] == [
        {
            "path": "labels.csv",
            "key": "train/labels.csv",
            "size": 4,
            "version": info.version,
            "mtime_ns": (dataset.path / "labels.csv").stat().st_mtime_ns,
            "crc32c": format(crc32c(b"a,b\n"), "08x"),
        }
    ]


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
    assert [one.phase for one in told if one.phase != "copying"] == ["listing", "checking", "done"]
    copying = [one for one in told if one.phase == "copying"]
    assert {(one.files_total, one.bytes_total) for one in copying} == {(21, dataset.bytes)}
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


def test_a_broken_manifest_costs_time_not_truth(cache: DataCache, store: Counting, origin: Path) -> None:
    dataset = cache.sync(source_of(store))
    (dataset.path.parent / "manifest.json").write_bytes(b'{"files": [{"path": "../../x"')
    assert cache.sync(source_of(store)).fetched_files == 21
    assert tree(dataset.path) == tree(origin / "train")


def test_a_manifest_cannot_remove_files_elsewhere(cache: DataCache, store: Counting, tmp_path: Path) -> None:
    dataset = cache.sync(source_of(store))
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    manifest = dataset.path.parent / "manifest.json"
    data = json.loads(manifest.read_bytes())
    data["files"][0]["path"] = "../../../../precious"
    manifest.write_text(json.dumps(data))
    cache.sync(source_of(store))
    assert precious.exists()


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


# Keys that no disk can hold


@pytest.mark.parametrize(
    "objects",
    [
        {"../x": b"1"},
        {"a/../../x": b"1"},
        {"/abs": b"1"},
        {"a//b": b"1"},
        {"a\nb": b"1"},
        {"x": b"1", "x/y": b"2"},
        {"n" * 256: b"1"},
    ],
)
def test_hostile_and_conflicting_keys_are_named_before_anything_is_fetched(
    cache: DataCache, tmp_path: Path, objects: dict[str, bytes]
) -> None:
    calls: list[str] = []

    def watch(operation: str, _key: str, _nth: int) -> Fault | None:
        calls.append(operation)
        return None

    store = MemoryStore(watch, objects=objects | {"fine": b"x"})
    with pytest.raises(DataError) as caught:
        cache.sync(Source("memory://", store))
    assert all(repr(key) in caught.value.message for key in objects)
    assert "exclude" in caught.value.hint
    assert "download" not in calls
    assert [name for name in tree(tmp_path) if not name.endswith(("lock", "in-use"))] == []


def test_what_conflicts_may_be_excluded(cache: DataCache) -> None:
    store = MemoryStore(objects={"x": b"1", "x/y": b"2", "a//b": b"3"})
    dataset = cache.sync(Source("memory://", store, exclude=("x/**", "a/**")))
    assert tree(dataset.path) == {"x": b"1"}


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
def test_archives_wait_for_another_version(cache: DataCache, name: str) -> None:
    store = MemoryStore(objects={f"p/{name}": b"x", "p/plain": b"x"})
    with pytest.raises(NotYetError) as caught:
        cache.sync(source_of(store, "p"))
    assert "extract: never" in caught.value.hint
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


def test_a_short_download_is_noticed(cache: DataCache) -> None:
    class Short(MemoryStore):
        def download(
            self, key: str, target: Path, *, version: str | None = None, on_bytes: OnBytes = ignore_bytes
        ) -> None:
            super().download(key, target, version=version, on_bytes=on_bytes)
            os.truncate(target, 3)

    with pytest.raises(ObjectChanged, match="3 bytes arrived where 5"):
        cache.sync(Source("memory://", Short(objects={"k": b"12345"})))
    assert not cache.entries()[0].complete


def test_one_bad_file_ends_the_sync_and_the_rest_is_kept(cache: DataCache) -> None:
    objects = {f"k{number:02}": b"x" for number in range(40)}
    broken = True

    def plan(operation: str, key: str, _nth: int) -> Fault | None:
        return Fault(StoreUnreachable("server error")) if broken and (operation, key) == ("download", "k20") else None

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
        if operation != "download":
            return None
        barrier.wait(10)
        return Fault(AccessDenied("no", "ask the owner") if key == "k4" else StoreUnreachable("down"))

    store = MemoryStore(all_fail, objects={f"k{number}": b"x" for number in range(5)})
    with pytest.raises(AccessDenied, match=r"could not bring k.*; k.*; k.*; and 2 more") as caught:
        cache.sync(Source("memory://", store), workers=5)
    assert caught.value.hint == "ask the owner"


def test_faults_of_ours_come_through_as_they_are(cache: DataCache) -> None:
    class Buggy(MemoryStore):
        def download(self, *_args: object, **_more: object) -> None:
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
    assert cache.sync(source_of(store)).fetched_files == 12
    assert tree(cache.sync(source_of(store)).path) == tree(origin / "train")


def test_a_stop_ends_a_large_download_in_the_middle(cache: DataCache, tmp_path: Path) -> None:
    stop, moved = threading.Event(), list[int]()

    class Watched(MemoryStore):
        def download(
            self, key: str, target: Path, *, version: str | None = None, on_bytes: OnBytes = ignore_bytes
        ) -> None:
            def count(size: int) -> None:
                moved.append(size)
                stop.set()
                on_bytes(size)

            super().download(key, target, version=version, on_bytes=count)

    with pytest.raises(SyncStopped):
        cache.sync(Source("memory://", Watched(objects={"k": b"x" * (5 << 20)})), stop=stop)
    assert len(moved) == 1
    assert not list((tmp_path / "cache").rglob("parts/*"))


def test_a_listener_that_raises_ends_the_sync_and_keeps_what_came(cache: DataCache, store: Counting) -> None:
    def interrupt(progress: SyncProgress) -> None:
        if progress.phase == "copying":
            raise KeyboardInterrupt

    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        cache.sync(source_of(store), workers=1, report=interrupt)
    assert threading.active_count() == threads
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
    def download(self, key, target, **more):
        time.sleep(float(sys.argv[3]))
        with open(sys.argv[4], "a") as log:
            log.write(key + "\\n")
        super().download(key, target, **more)

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
    progress = tmp_path / "cache/data" / entry_name(source_of(store)) / "progress.jsonl"
    with child(Path(store.url.removeprefix("file://")), tmp_path, 0.05) as process:
        while len(lines(progress)) < 6:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    recorded = len(lines(progress)) - 1
    leftover = progress.parent / "parts/leftover"
    leftover.write_bytes(b"half a file")
    [entry] = cache.entries()
    assert (entry.complete, entry.files, entry.in_use, entry.source) == (False, recorded, False, source_of(store).url)
    dataset = cache.sync(source_of(store))
    assert 5 <= recorded < 21
    assert len(store.downloads) == dataset.fetched_files == 21 - recorded
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
    assert not (dataset.path.parent / "manifest.json").exists()
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
    with pytest.raises(DiskFull, match=r"needs 1\.4 MiB, 0 B free") as caught:
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
def test_a_read_only_cache_says_so(mount: Callable[[str], Path], store: Counting) -> None:
    disk = mount("size=2m,ro")
    with pytest.raises(AccessDenied):
        DataCache(disk).sync(source_of(store))
