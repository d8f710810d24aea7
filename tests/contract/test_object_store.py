"""What every ObjectStore promises. A new store joins by one more factory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from runner.errors import BadKey, ObjectChanged, ObjectExists, ObjectMissing, SourceChanged
from runner.storage.access import Access
from runner.storage.api import ObjectInfo, ObjectStore
from runner.storage.bucket_store import BucketStore
from runner.storage.folder import FolderStore
from runner.storage.memory import MemoryStore
from runner.storage.obs.bucket import ObsBucket
from runner.storage.opening import open_store
from runner.storage.retrying import Retry, RetryingStore
from tests.servers import Server
from tests.storage.memory_bucket import MemoryBucket

Ask = Callable[[str], Any]
"""Gives a session's server by its fixture's name: it starts when the first test asks for it."""

FACTORIES: dict[str, Callable[[Path, Ask], ObjectStore]] = {
    "memory": lambda _tmp, _ask: MemoryStore(),
    "folder": lambda tmp, _ask: FolderStore(tmp / "store"),
    "retrying": lambda _tmp, _ask: RetryingStore(MemoryStore(), Retry(5)),
    "bucket": lambda _tmp, _ask: BucketStore(MemoryBucket(), "some/prefix/", Retry(5)),
    "s3 on seaweedfs": lambda _tmp, ask: on_server(ask("seaweedfs"), ask("fresh_bucket")),
    "s3 on ministack": lambda _tmp, ask: on_server(ask("ministack"), ask("fresh_bucket")),
    "obs by its sdk": lambda _tmp, ask: by_sdk(ask("obs"), ask("fresh_bucket")),
    "obs by its sdk on seaweedfs": lambda _tmp, ask: by_sdk(ask("seaweedfs"), ask("fresh_bucket")),
}


def on_server(server: Server, fresh_bucket: Callable[[Server], str]) -> ObjectStore:
    return open_store(f"s3://{fresh_bucket(server)}/some/prefix", server.access(), Retry(20))


def by_sdk(server: Any, fresh_bucket: Callable[[Any], str]) -> ObjectStore:
    keys = {"OBS_ACCESS_KEY_ID": server.access_key, "OBS_SECRET_ACCESS_KEY": server.secret_key}
    access = Access(endpoint=server.endpoint, region=server.region, environ=keys)
    return BucketStore(ObsBucket(fresh_bucket(server), access), "some/prefix/", Retry(20))


BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/.",
    "a/..",
    "../a",
    "a/../b",
    "./a",
    "a\0b",
    "a\nb",
    "\x7f",
    "\ud800",
]
BAD_KEYS += ["k" * 1025]

ODD_KEYS = [
    " leading and trailing ",
    "a b/c  d",
    "unicode/äöü/數據/🚀",
    "percent%20/%2F%",
    "plus+and&amp;",
    "hash#tag?query=1",
    "quotes'\"`$HOME",
    "back\\slash",
    "[brackets]{braces}(parens)*~^|<>;:,=@!",
    ".hidden/..twodots/...",
    "-rf",
    "n" * 255,
    "/".join(["deep"] * 60),
]


@pytest.fixture(params=FACTORIES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return FACTORIES[request.param](tmp_path, request.getfixturevalue)


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix))


def same(one: ObjectInfo, other: ObjectInfo) -> bool:
    """The same object in the same version. A store may not tell the exact time of a write before it lists it."""
    return one[:3] == other[:3] and abs(one.modified - other.modified) < 5


def the(store: ObjectStore, key: str) -> ObjectInfo:
    [info] = [info for info in store.list(key) if info.key == key]
    return info


def test_an_absent_root_is_an_empty_store(store: ObjectStore) -> None:
    assert keys(store) == []
    assert keys(store, "some/prefix") == []
    store.delete(["some/key"])


def test_what_was_written_is_read_and_listed(store: ObjectStore) -> None:
    info = store.write("a/b", b"hello")
    assert store.read("a/b") == b"hello"
    [listed] = store.list()
    assert same(listed, info)
    assert (info.key, info.size) == ("a/b", 5)
    assert info.modified > 1_600_000_000


def test_a_prefix_is_a_plain_string(store: ObjectStore) -> None:
    for key in ["a/b", "a/bc", "a/bcd/e", "a/c", "ab", "b"]:
        store.write(key, b"")
    assert keys(store, "a/b") == ["a/b", "a/bc", "a/bcd/e"]
    assert keys(store, "a/b/") == []
    assert keys(store, "a/bcd/") == ["a/bcd/e"]
    assert keys(store, "a") == ["a/b", "a/bc", "a/bcd/e", "a/c", "ab"]
    assert keys(store, "a/") == ["a/b", "a/bc", "a/bcd/e", "a/c"]
    assert keys(store, "x/y") == []


@pytest.mark.parametrize("prefix", ["/", "/a", "../", "a/../b", "a//b", "a\nb"])
def test_a_prefix_that_no_key_can_have_is_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(BadKey):
        list(store.list(prefix))


def test_a_write_replaces(store: ObjectStore) -> None:
    first = store.write("k", b"one")
    second = store.write("k", b"two")
    assert store.read("k") == b"two"
    assert first.version != second.version
    assert same(the(store, "k"), second)


def test_the_version_stays_while_nothing_changes(store: ObjectStore) -> None:
    info = store.write("k", b"data")
    store.read("k")
    store.write("other", b"data")
    assert the(store, "k").version == info.version


def test_every_change_has_its_own_version(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    versions = []
    for number in range(10):
        source.write_bytes(b"same size %d" % number)
        versions.append(store.upload(source, "k").version)
    assert len(set(versions)) == 10


def test_a_new_key_is_written_once(store: ObjectStore) -> None:
    store.write("k", b"first", only_new=True)
    with pytest.raises(ObjectExists):
        store.write("k", b"second", only_new=True)
    assert store.read("k") == b"first"
    store.delete(["k"])
    store.write("k", b"third", only_new=True)
    assert store.read("k") == b"third"


def test_of_many_writers_of_a_new_key_one_wins(store: ObjectStore) -> None:
    if not store.exclusive:
        pytest.skip("this store does not decide between writers, and says so")

    def claim(round_: int, writer: int) -> bytes | None:
        body = b"%d" % writer
        try:
            store.write(f"race/{round_}", body, only_new=True)
        except ObjectExists:
            return None
        return body

    with ThreadPoolExecutor(8) as pool:
        for round_ in range(20):
            claims = [pool.submit(claim, round_, writer) for writer in range(8)]
            winners = [body for job in claims if (body := job.result()) is not None]
            assert winners == [store.read(f"race/{round_}")]


def test_a_reader_never_sees_a_mix(store: ObjectStore, tmp_path: Path) -> None:
    size = 200_000
    store.write("k", b"0" * size)
    done = threading.Event()

    def look() -> int:
        looks = 0
        while not done.is_set() or looks == 0:
            data = store.read("k")
            assert len(data) == size
            assert len(set(data)) == 1
            looks += 1
        return looks

    def download(number: int) -> int:
        target = tmp_path / f"copy{number}"
        looks = 0
        while not done.is_set() or looks == 0:
            store.download("k", target)
            assert target.read_bytes() == target.read_bytes()[:1] * size
            looks += 1
        return looks

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(look), pool.submit(look), pool.submit(download, 1), pool.submit(download, 2)]
        for number in range(40):
            store.write("k", b"%d" % (number % 10) * size)
        done.set()
        assert all(job.result() for job in jobs)


def test_missing_objects(store: ObjectStore, tmp_path: Path) -> None:
    store.write("a/b/c", b"")
    for key in ["nothing", "a", "a/b", "a/b/c/d", "a/b/x"]:
        with pytest.raises(ObjectMissing):
            store.read(key)
        with pytest.raises(ObjectMissing):
            store.download(key, tmp_path / "copy")


def test_deleting_twice_is_no_error(store: ObjectStore) -> None:
    for key in ["a/1", "a/2", "b"]:
        store.write(key, b"x")
    store.delete(["a/1", "b", "a/1", "never/was"])
    store.delete(["b"])
    store.delete([])
    assert keys(store) == ["a/2"]
    store.delete(iter(["a/2"]))
    assert keys(store) == []
    store.write("a", b"the folder has gone with its last object")
    assert keys(store) == ["a"]


def test_deleting_a_prefix_deletes_nothing(store: ObjectStore) -> None:
    store.write("a/b", b"x")
    store.delete(["a"])
    assert keys(store) == ["a/b"]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_are_keys(store: ObjectStore, tmp_path: Path, key: str, request: pytest.FixtureRequest) -> None:
    if "\\" in key and "on seaweedfs" in request.node.name:
        pytest.skip("this server takes a backslash for a slash")
    store.write(key, b"odd")
    assert store.read(key) == b"odd"
    assert keys(store) == keys(store, key) == [key]
    store.download(key, tmp_path / "copy", version=the(store, key).version)
    store.upload(tmp_path / "copy", key)
    store.delete([key])
    assert keys(store) == []


def test_a_very_long_segment_works_or_is_refused(store: ObjectStore) -> None:
    key = "a/" + "n" * 400
    try:
        store.write(key, b"x")
    except BadKey:
        assert keys(store) == []
    else:
        assert store.read(key) == b"x"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused_everywhere(store: ObjectStore, tmp_path: Path, key: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    attempts: list[Callable[[], object]] = [
        lambda: store.read(key),
        lambda: store.write(key, b"x"),
        lambda: store.write(key, b"x", only_new=True),
        lambda: store.write(key, b"x", replacing="v"),
        lambda: store.look(key),
        lambda: store.copy(key, "good"),
        lambda: store.copy("good", key),
        lambda: store.download(key, tmp_path / "copy"),
        lambda: store.upload(source, key),
        lambda: store.delete([key]),
    ]
    for attempt in attempts:
        with pytest.raises(BadKey):
            attempt()
    assert keys(store) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source"]


@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b"), ("a", "a/b/c")])
def test_a_key_below_a_key_works_or_is_refused(store: ObjectStore, tmp_path: Path, first: str, second: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"two")
    store.write(first, b"one")
    attempts: list[Callable[[], object]] = [
        lambda: store.write(second, b"two"),
        lambda: store.upload(source, second),
        lambda: store.write(second, b"two", only_new=True),
    ]
    for attempt in attempts:
        try:
            attempt()
        except BadKey:
            assert keys(store) == [first]
        except ObjectExists:
            assert store.read(second) == b"two"
    assert store.read(first) == b"one"


def test_an_empty_object(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.touch()
    assert store.upload(source, "up").size == 0
    assert store.write("written", b"").size == 0
    assert store.read("up") == store.read("written") == b""
    store.download("up", tmp_path / "copy", version=the(store, "up").version)
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_large_object_passes_whole_and_says_how_far_it_is(store: ObjectStore, tmp_path: Path) -> None:
    source, copy, moved = tmp_path / "source", tmp_path / "copy", list[int]()
    data = os.urandom(1 << 20) * 20 + b"tail"
    source.write_bytes(data)
    info = store.upload(source, "big", on_bytes=moved.append)
    assert same(info, the(store, "big"))
    assert info.size == sum(moved) == len(data)
    moved.clear()
    store.download("big", copy, version=info.version, on_bytes=moved.append)
    assert copy.read_bytes() == data == store.read("big")
    assert sum(moved) == len(data)
    assert len(moved) > 1


def test_a_download_tells_the_checksum_or_nothing(store: ObjectStore, tmp_path: Path) -> None:
    for size in (0, 7, (70 << 20) + 1):
        content = bytes(range(256)) * (size // 256) + bytes(size % 256)
        (tmp_path / "source").write_bytes(content)
        store.upload(tmp_path / "source", "k")
        assert store.download("k", tmp_path / "target") in (None, crc32c(content))


def test_a_download_replaces_what_was_in_the_file(store: ObjectStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(b"something much longer")
    store.write("k", b"short")
    store.download("k", copy)
    assert copy.read_bytes() == b"short"


def test_a_version_that_has_gone_is_not_downloaded(store: ObjectStore, tmp_path: Path) -> None:
    old = store.write("k", b"old")
    new = store.write("k", b"new")
    with pytest.raises(ObjectChanged):
        store.download("k", tmp_path / "copy", version=old.version)
    store.download("k", tmp_path / "copy", version=new.version)
    assert (tmp_path / "copy").read_bytes() == b"new"


def test_an_object_that_is_replaced_in_mid_download_is_whole_or_refused(store: ObjectStore, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"x" * (40 << 20))
    info = store.upload(source, "k")
    replaced = threading.Event()

    def replace_once(_count: int) -> None:
        if not replaced.is_set():
            replaced.set()
            store.write("k", b"other")

    try:
        store.download("k", copy, version=info.version, on_bytes=replace_once)
    except ObjectChanged:
        assert store.read("k") == b"other"
    else:
        assert copy.read_bytes() == source.read_bytes()


def test_a_file_that_changes_in_mid_upload_is_noticed(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * (20 << 20))

    def append(_count: int) -> None:
        with source.open("ab") as file:
            file.write(b"more")

    with pytest.raises(SourceChanged):
        store.upload(source, "k", on_bytes=append)
    assert keys(store) == []


def test_a_file_that_is_replaced_in_mid_upload_is_noticed(store: ObjectStore, tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    source.write_bytes(b"x" * 1000)
    other.write_bytes(b"y" * 1000)

    def swap(_count: int) -> None:
        if other.exists():
            other.replace(source)

    with pytest.raises(SourceChanged):
        store.upload(source, "k", on_bytes=swap)
    assert keys(store) == []


def test_a_file_that_has_gone_is_not_uploaded(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(SourceChanged):
        store.upload(tmp_path / "nothing", "k")
    assert keys(store) == []


def test_a_listener_that_raises_ends_the_transfer(store: ObjectStore, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def enough(_count: int) -> None:
        raise EnoughError

    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    with pytest.raises(EnoughError):
        store.upload(source, "k", on_bytes=enough)
    assert keys(store) == []
    store.upload(source, "k")
    with pytest.raises(EnoughError):
        store.download("k", tmp_path / "copy", on_bytes=enough)


def test_many_threads_at_once(store: ObjectStore, tmp_path: Path) -> None:
    def work(number: int) -> None:
        source, body = tmp_path / f"source{number}", b"%d" % number * 1000
        source.write_bytes(body)
        for turn in range(5):
            key = f"shared/{number % 3}/{number}-{turn}"
            store.upload(source, key)
            store.download(key, tmp_path / f"copy{number}")
            assert (tmp_path / f"copy{number}").read_bytes() == body == store.read(key)
            store.delete([key])
        store.write(f"left/{number}", body)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(24)))
    assert keys(store) == sorted(f"left/{number}" for number in range(24))


def test_listing_while_others_delete(store: ObjectStore) -> None:
    names = [f"d{number % 7}/{number}" for number in range(300)]
    for name in [*names, "keep/1", "keep/2"]:
        store.write(name, b"x")

    def delete_one_by_one() -> None:
        for name in names:
            store.delete([name])

    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(delete_one_by_one)
        while not deleting.done():
            seen = keys(store)
            assert {"keep/1", "keep/2"} <= set(seen)
            assert len(seen) == len(set(seen))
    assert keys(store) == ["keep/1", "keep/2"]


def test_folders_are_the_names_before_the_next_slash(store: ObjectStore) -> None:
    for key in ["a/1/x", "a/1/y", "a/2/x", "a/file", "a b/x", "top", *(f"many/{n}/x" for n in range(12))]:
        store.write(key, b"")
    assert sorted(store.folders()) == ["a", "a b", "many"]
    assert sorted(store.folders("a/")) == ["1", "2"]
    assert sorted(store.folders("many/")) == sorted(map(str, range(12)))
    assert list(store.folders("a/1/")) == list(store.folders("nothing/")) == []
    with pytest.raises(BadKey):
        list(store.folders("a"))


def test_a_look_tells_the_version_that_it_saw(store: ObjectStore) -> None:
    for body in (b"one", b"two", b""):
        info = store.write("k", body)
        assert store.look("k") == (body, info.version) == (store.read("k"), the(store, "k").version)
    with pytest.raises(ObjectMissing):
        store.look("nothing")


def test_a_look_refuses_what_has_grown(store: ObjectStore) -> None:
    info = store.write("k", b"x" * 1000)
    assert store.look("k", at_most=1000) == (b"x" * 1000, info.version)
    with pytest.raises(ObjectChanged):
        store.look("k", at_most=999)


def test_a_version_is_replaced_once(store: ObjectStore) -> None:
    first = store.write("k", b"first")
    second = store.write("k", b"second", replacing=first.version)
    assert store.look("k") == (b"second", second.version)
    with pytest.raises(ObjectChanged):
        store.write("k", b"third", replacing=first.version)
    assert store.read("k") == b"second"
    with pytest.raises((ObjectMissing, ObjectChanged)):
        store.write("nothing", b"x", replacing=first.version)
    assert keys(store) == ["k"]


def test_of_many_that_replace_one_version_one_wins(store: ObjectStore) -> None:
    if not store.exclusive:
        pytest.skip("this store does not decide between writers, and says so")

    def claim(version: str, body: bytes) -> bytes | None:
        try:
            store.write("k", body, replacing=version)
        except ObjectChanged:
            return None
        return body

    version = store.write("k", b"begin").version
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(20):
            claims = [pool.submit(claim, version, b"%d-%d" % (round_, writer)) for writer in range(8)]
            winners = [body for job in claims if (body := job.result()) is not None]
            data, version = store.look("k")
            assert winners == [data]


def test_an_object_is_copied_inside_the_store(store: ObjectStore) -> None:
    for body in (b"", b"content"):
        info = store.write("from/here", body)
        copied = store.copy("from/here", "to/there", version=info.version)
        assert same(copied, the(store, "to/there"))
        assert store.read("to/there") == store.read("from/here") == body
    store.write("from/here", b"newer")
    with pytest.raises(ObjectChanged):
        store.copy("from/here", "to/there", version=info.version)
    with pytest.raises(ObjectMissing):
        store.copy("nothing", "to/there")
    assert store.read("to/there") == b"content"
    store.copy("from/here", "to/there")
    assert store.read("to/there") == b"newer"


@pytest.mark.parametrize("size", [0, 1000, 40 << 20])
def test_a_sink_sees_what_is_sent(store: ObjectStore, tmp_path: Path, size: int) -> None:
    source, seen = tmp_path / "source", list[bytearray]()
    source.write_bytes(os.urandom(size))

    def begin() -> Callable[[memoryview], None]:
        seen.append(bytearray())
        return seen[-1].extend

    store.upload(source, "k", sink=begin)
    assert bytes(seen[-1]) == source.read_bytes() == store.read("k")


def test_sweeping_leaves_whole_objects_alone(store: ObjectStore) -> None:
    store.sweep("", before=4e9)
    store.write("a/k", b"x")
    store.sweep("a/", before=4e9)
    store.sweep("", before=4e9)
    assert keys(store) == ["a/k"]


def test_the_url_is_for_people(store: ObjectStore) -> None:
    assert "://" in store.url
