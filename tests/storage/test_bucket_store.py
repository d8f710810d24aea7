"""What makes a store of a bucket: retries, parallel transfers, resuming, verification, conditions."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest
from crc32c import crc32c

from runner.errors import (
    AccessDenied,
    CloudrunError,
    CorruptData,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    SourceChanged,
    StoreUnreachable,
)
from runner.storage.api import ObjectInfo
from runner.storage.bucket import Answer, Buffer, Part
from runner.storage.bucket_store import BUFFERS, BucketStore
from runner.storage.download import RANGE, missing_spans
from runner.storage.local import reading
from runner.storage.retrying import Retry
from runner.storage.upload import PART, part_size_for, whole
from tests.storage.memory_bucket import CHUNK, Hook, MemoryBucket

DOWN = StoreUnreachable("down")
LARGE = 3 * RANGE + 12345


class Told:
    """A retry layer that does not wait, and what it told."""

    def __init__(self, give_up_after: float = 60) -> None:
        self.retries: list[tuple[str, str]] = []
        self.retry = Retry(
            give_up_after, on_retry=lambda what, error, _: self.retries.append((what, str(error))), sleep=lambda _: None
        )


def store_of(bucket: MemoryBucket, told: Told | None = None) -> BucketStore:
    return BucketStore(bucket, "job/", (told or Told()).retry)


class Failing:
    """Lets requests of one kind fail, the first ``times`` after ``after`` have passed."""

    def __init__(self, request: str, times: int, after: int = 0, error: CloudrunError = DOWN) -> None:
        self._request, self._times, self._after, self._error = request, times, after, error
        self._lock = threading.Lock()
        self.seen = Counter[str]()

    def __call__(self, request: str, _key: str) -> None:
        with self._lock:
            nth = self.seen[request]
            self.seen[request] += 1
        if request == self._request and self._after <= nth < self._after + self._times:
            raise self._error


@pytest.mark.parametrize("request_", ["put", "get", "chunk", "page", "head", "copy", "delete"])
def test_every_request_is_tried_again(tmp_path: Path, request_: str) -> None:
    told = Told()
    bucket = MemoryBucket(Failing(request_, 3))
    store = store_of(bucket, told)
    store.write("a", b"data")
    assert store.read("a") == b"data"
    store.download("a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"data"
    store.copy("a", "b")
    assert sorted(info.key for info in store.list()) == ["a", "b"]
    store.delete(["a", "b"])
    assert list(store.list()) == []
    assert len(told.retries) == 3


def large(bucket: MemoryBucket) -> bytes:
    data = os.urandom(LARGE)
    bucket.objects["job/big"] = (data, '"v1"')
    return data


def test_a_large_object_comes_in_ranges_that_go_on_where_they_were_cut(tmp_path: Path) -> None:
    failing = Failing("chunk", 10, after=5)
    bucket, told, moved = MemoryBucket(failing), Told(), list[int]()
    data = large(bucket)
    store_of(bucket, told).download("big", tmp_path / "copy", version='"v1"', on_bytes=moved.append)
    assert (tmp_path / "copy").read_bytes() == data
    # Nothing came twice: every cut range asked only for its rest.
    assert sum(moved) == LARGE
    assert failing.seen["chunk"] == -(-LARGE // CHUNK) + 10
    assert len(told.retries) == 10


def test_an_object_replaced_between_two_ranges_is_refused_with_a_version_and_begun_anew_without(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    large(bucket)
    newer = os.urandom(LARGE)

    def replace(request: str, _key: str) -> None:
        if request == "chunk":
            bucket.objects["job/big"] = (newer, '"v2"')

    bucket.hook = replace
    with pytest.raises(ObjectChanged):
        store_of(bucket).download("big", tmp_path / "copy", version='"v1"')
    large(bucket)
    store_of(bucket).download("big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == newer


def test_every_range_asks_for_the_version_of_the_first(tmp_path: Path) -> None:
    """Where nothing else would tell: the store keeps no digest."""

    class Unproved(MemoryBucket):
        @contextmanager
        def get(
            self, key: str, *, version: str | None = None, start: int = 0, length: int | None = None
        ) -> Iterator[Answer]:
            with super().get(key, version=version, start=start, length=length) as answer:
                yield replace(answer, proof=None)

    bucket = Unproved()
    large(bucket)

    def change(request: str, _key: str) -> None:
        if request == "chunk":
            bucket.objects["job/big"] = (os.urandom(LARGE), '"v2"')

    bucket.hook = change
    with pytest.raises(ObjectChanged):
        store_of(bucket).download("big", tmp_path / "copy", version='"v1"')


def test_a_download_goes_on_in_another_process(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    def kill(request: str, _key: str) -> None:
        counts[request] += 1
        if counts["chunk"] > 70:
            raise KilledError

    counts = Counter[str]()
    bucket, copy, note = MemoryBucket(kill), tmp_path / "copy", tmp_path / "note"
    data = large(bucket)
    with pytest.raises(KilledError):
        store_of(bucket).download("big", copy, version='"v1"', note=note)
    moved = list[int]()
    bucket.hook = lambda _request, _key: None
    store_of(bucket).download("big", copy, version='"v1"', note=note, on_bytes=moved.append)
    assert copy.read_bytes() == data
    assert RANGE <= LARGE - sum(moved) <= 70 * CHUNK
    assert not note.exists()


def test_a_note_of_another_version_is_of_no_use(tmp_path: Path) -> None:
    bucket, copy, note = MemoryBucket(Failing("chunk", 10**9, after=40)), tmp_path / "copy", tmp_path / "note"
    large(bucket)
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).download("big", copy, version='"v1"', note=note)
    assert note.exists()
    data = os.urandom(LARGE)
    bucket.objects["job/big"], bucket.hook = (data, '"v2"'), lambda _request, _key: None
    store_of(bucket).download("big", copy, version='"v2"', note=note)
    assert copy.read_bytes() == data


@pytest.mark.parametrize("size", [1000, LARGE])
def test_bytes_that_do_not_match_the_digest_are_fetched_again_and_then_refused(tmp_path: Path, size: int) -> None:
    class Flipping(MemoryBucket):
        flips = 0

        def _chunks(self, key: str, data: bytes) -> Iterator[memoryview]:
            for number, chunk in enumerate(super()._chunks(key, data)):
                if number == 0 and self.flips:
                    self.flips -= 1
                    chunk = memoryview(bytes([chunk[0] ^ 1]) + bytes(chunk[1:]))  # noqa: PLW2901
                yield chunk

    bucket, told = Flipping(), Told()
    data = os.urandom(size)
    bucket.put("job/k", data)
    bucket.flips = 2
    store_of(bucket, told).download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert len(told.retries) in (1, 2)
    bucket.flips = 10**6
    with pytest.raises(CorruptData):
        store_of(bucket).download("k", tmp_path / "copy", note=tmp_path / "note")
    if size < RANGE:
        with pytest.raises(StoreUnreachable):
            store_of(bucket, Told(0)).read("k")


def test_a_proof_that_is_none_refuses_nothing(tmp_path: Path) -> None:
    class Encrypted(MemoryBucket):
        def _chunks(self, key: str, data: bytes) -> Iterator[memoryview]:
            yield from (memoryview(bytes(255 - byte for byte in chunk)) for chunk in super()._chunks(key, data))

    store = store_of(bucket := Encrypted(proves=False))
    bucket.put("job/k", b"plain")
    store.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == store.read("k") == bytes(255 - byte for byte in b"plain")


def source_of(tmp_path: Path, size: int) -> tuple[Path, bytes]:
    source = tmp_path / "source"
    data = os.urandom(size)
    source.write_bytes(data)
    return source, data


def test_a_large_file_goes_in_parts_and_is_read_once_in_order(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 12 * PART + 77)
    failing, told, moved, whole = Failing("put_part", 4, after=3), Told(), list[int](), blake3.blake3()
    bucket = MemoryBucket(failing)
    info = store_of(bucket, told).upload(source, "big", on_bytes=moved.append, sink=lambda: whole.update)
    assert bucket.objects["job/big"] == (data, info.version)
    assert (info.key, info.size, sum(moved)) == ("big", len(data), len(data))
    assert whole.digest() == blake3.blake3(data).digest()
    assert failing.seen["put_part"] == 13 + 4
    assert [what for what, _ in told.retries] == ["upload"] * 4


def test_the_memory_of_uploads_is_bounded(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 3 * BUFFERS * PART)
    held, most, lock = 0, 0, threading.Lock()

    class Counting(MemoryBucket):
        def put_part(self, key: str, upload: str, number: int, data: Buffer) -> Part:
            nonlocal held, most
            with lock:
                held += 1
                most = max(most, held)
            try:
                return super().put_part(key, upload, number, data)
            finally:
                with lock:
                    held -= 1

    store = store_of(bucket := Counting())
    uploads = [threading.Thread(target=store.upload, args=(source, f"big{number}")) for number in range(4)]
    for upload in uploads:
        upload.start()
    for upload in uploads:
        upload.join()
    assert {key: content == data for key, (content, _) in bucket.objects.items()} == {
        f"job/big{number}": True for number in range(4)
    }
    assert 1 < most <= BUFFERS


def test_an_upload_goes_on_in_another_process(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    source, data = source_of(tmp_path, 10 * PART)
    note, arrived = tmp_path / "note", list[int]()

    def kill(request: str, _key: str) -> None:
        if request == "put_part" and len(arrived) >= 5:
            raise KilledError
        arrived.append(1) if request == "put_part" else None

    bucket = MemoryBucket(kill)
    with pytest.raises(KilledError):
        store_of(bucket).upload(source, "big", note=note)
    assert len(bucket.uploads) == 1
    counting = Failing("", 0)
    bucket.hook, whole = counting, blake3.blake3()
    store_of(bucket).upload(source, "big", note=note, sink=lambda: whole.update)
    assert counting.seen["put_part"] == 5
    assert counting.seen["begin"] == 0
    assert bucket.objects["job/big"][0] == data
    assert whole.digest() == blake3.blake3(data).digest()
    assert bucket.uploads == {}
    assert not note.exists()


def test_a_resumed_upload_sends_what_has_changed_or_vanished_anew(tmp_path: Path) -> None:
    source, _ = source_of(tmp_path, 4 * PART)
    note = tmp_path / "note"
    bucket = MemoryBucket(Failing("finish", 10**9))
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).upload(source, "big", note=note)
    # As when something wrote into the file and set its time back: only the bytes tell.
    before = source.stat()
    with source.open("r+b") as file:
        file.seek(PART)
        file.write(b"changed")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    [(_, parts)] = bucket.uploads.values()
    del parts[4]
    counting = Failing("", 0)
    bucket.hook = counting
    store_of(bucket).upload(source, "big", note=note)
    assert bucket.objects["job/big"][0] == source.read_bytes()
    assert counting.seen["put_part"] == 2


def test_an_upload_that_the_store_has_forgotten_begins_anew(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 4 * PART)
    bucket, note = MemoryBucket(Failing("finish", 10**9)), tmp_path / "note"
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).upload(source, "big", note=note)
    bucket.uploads.clear()
    bucket.hook = lambda _request, _key: None
    store_of(bucket).upload(source, "big", note=note)
    assert bucket.objects["job/big"][0] == data


def test_a_failed_upload_leaves_nothing_behind_and_a_lost_answer_is_a_success(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 3 * PART)
    bucket = MemoryBucket(Failing("finish", 10**9))
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).upload(source, "big")
    assert (bucket.uploads, bucket.objects) == ({}, {})
    bucket.hook = Failing("finish answered", 1)
    assert store_of(bucket).upload(source, "big").size == len(data)


def test_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    for key in ["job/a/1", "job/b/2", "other/a/3"]:
        bucket.begin(key)
    store = store_of(bucket)
    store.sweep("a/", before=999)
    assert len(bucket.uploads) == 3
    store.sweep("a/", before=1001)
    assert sorted(key for key, _ in bucket.uploads.values()) == ["job/b/2", "other/a/3"]


def test_conditions_are_proved_once_and_leave_no_trace() -> None:
    counting = Failing("", 0)
    bucket = MemoryBucket(counting)
    store = store_of(bucket)
    assert store.exclusive
    assert store.exclusive
    assert counting.seen["put"] == 4
    assert bucket.objects == {}


@pytest.mark.parametrize("nth", range(4))
def test_a_lost_answer_does_not_spoil_the_proof(nth: int) -> None:
    for request in ["put", "put answered"]:
        assert store_of(MemoryBucket(Failing(request, 1, after=nth))).exclusive


def test_a_store_that_ignores_conditions_is_found_out_and_looked_at_first() -> None:
    store = store_of(MemoryBucket(conditions=False))
    assert not store.exclusive
    first = store.write("k", b"1", only_new=True)
    with pytest.raises(ObjectExists):
        store.write("k", b"2", only_new=True)
    with pytest.raises(ObjectChanged):
        store.write("k", b"3", replacing='"other"')
    with pytest.raises(ObjectMissing):
        store.write("nothing", b"3", replacing='"other"')
    store.write("k", b"4", replacing=first.version)
    assert store.read("k") == b"4"


@pytest.mark.parametrize("hook", [Failing("put answered", 1, after=4), Failing("put", 1, after=4)])
def test_a_conditional_write_whose_answer_was_lost_is_known_again(hook: Hook) -> None:
    bucket = MemoryBucket(hook)
    store = store_of(bucket)
    assert store.exclusive
    info = store.write("k", b"ours", only_new=True)
    assert store.look("k") == (b"ours", info.version)


def test_part_sizes_stay_within_the_limits_of_providers() -> None:
    for size in [1, PART, 100 << 30, 1 << 40, 5 << 40]:
        part = part_size_for(size)
        assert part >= PART
        assert part % (1 << 20) == 0
        assert -(-size // part) <= 9000


def test_missing_spans() -> None:
    assert list(missing_spans(10, [])) == [(0, 10)]
    assert list(missing_spans(10, [(4, 6), (0, 2), (9, 10)])) == [(2, 4), (6, 9)]
    assert list(missing_spans(10, [(0, 10)])) == []
    assert list(missing_spans(2 * RANGE + 1, [(1, RANGE)])) == [(0, 1), (RANGE, 2 * RANGE), (2 * RANGE, 2 * RANGE + 1)]


def test_a_shorter_version_has_no_tail_of_a_longer_one(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    bucket.objects["job/k"] = (b"A" * 200_000, '"v1"')

    def die_once(request: str, _key: str) -> None:
        if request == "chunk" and bucket.objects["job/k"][1] == '"v1"':
            os.pwrite(os.open(tmp_path / "copy", os.O_RDWR), b"A" * 1000, 0)
            bucket.objects["job/k"] = (b"new", '"v2"')
            raise DOWN

    bucket.hook = die_once
    store_of(bucket).download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"new"


@pytest.mark.parametrize("dies_at", ["get", "chunk"])
def test_a_note_never_speaks_of_another_file(tmp_path: Path, dies_at: str) -> None:
    bucket, copy, note = MemoryBucket(Failing("chunk", 10**9, after=70)), tmp_path / "copy", tmp_path / "note"
    data = large(bucket)
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).download("big", copy, version='"v1"', note=note)
    assert note.exists()
    copy.unlink()
    bucket.hook = Failing(dies_at, 10**9)
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).download("big", copy, version='"v1"', note=note)
    copy.write_bytes(bytes(LARGE))
    bucket.hook, bucket.proves = lambda _request, _key: None, False
    store_of(bucket).download("big", copy, version='"v1"', note=note)
    assert copy.read_bytes() == data


def test_an_old_object_of_the_same_size_is_not_the_new_one(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 3 * PART)
    bucket = MemoryBucket()
    bucket.put("job/big", b"o" * len(data))

    def aborted(request: str, _key: str) -> None:
        if request == "finish" and bucket.uploads:
            bucket.uploads.clear()
            bucket.hook = lambda _request, _key: None
            raise DOWN

    bucket.hook = aborted
    store_of(bucket).upload(source, "big")
    assert bucket.objects["job/big"][0] == data


def test_an_upload_that_somebody_aborts_under_way_begins_anew(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 4 * PART)
    bucket, seen = MemoryBucket(), list[blake3.blake3]()

    def abort_once(request: str, _key: str) -> None:
        if request == "put_part":
            bucket.hook = lambda _request, _key: None
            bucket.uploads.clear()

    def begin() -> Callable[[memoryview], object]:
        seen.append(blake3.blake3())
        return seen[-1].update

    bucket.hook = abort_once
    store_of(bucket).upload(source, "big", sink=begin)
    assert bucket.objects["job/big"][0] == data
    assert seen[-1].digest() == blake3.blake3(data).digest()


def test_to_go_on_takes_no_right_that_sending_has_no_need_of(tmp_path: Path) -> None:
    source, data = source_of(tmp_path, 4 * PART)
    bucket, note = MemoryBucket(Failing("finish", 10**9)), tmp_path / "note"
    with pytest.raises(StoreUnreachable):
        store_of(bucket, Told(0)).upload(source, "big", note=note)
    bucket.hook = Failing("parts", 10**9, error=AccessDenied("no"))
    store_of(bucket).upload(source, "big", note=note)
    assert bucket.objects["job/big"][0] == data


@pytest.mark.parametrize("way", ["up", "down"])
def test_one_final_failure_ends_the_others_at_once_and_is_the_one_that_is_told(tmp_path: Path, way: str) -> None:
    source, _ = source_of(tmp_path, 8 * PART)
    tries = Counter[str]()
    lock = threading.Lock()

    def one_says_no(request: str, _key: str) -> None:
        with lock:
            tries[request] += 1
            nth = tries[request]
        if request in ("put_part", "chunk") and nth > 1:
            raise AccessDenied("no") if nth == 5 else DOWN

    bucket = MemoryBucket()
    large(bucket)
    bucket.hook = one_says_no
    store = BucketStore(bucket, "job/", Retry(5))
    with pytest.raises(AccessDenied):
        store.upload(source, "up") if way == "up" else store.download("big", tmp_path / "copy", version='"v1"')
    assert tries["put_part" if way == "up" else "chunk"] < 30


def test_a_look_does_not_fetch_what_has_grown() -> None:
    bucket = MemoryBucket()
    bucket.put("job/k", b"x" * 1000)
    assert store_of(bucket).look("k", at_most=1000)[0] == b"x" * 1000
    with pytest.raises(ObjectChanged):
        store_of(bucket).look("k", at_most=999)


def test_a_small_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    with reading(source) as file:
        os.truncate(source, 10)
        with pytest.raises(SourceChanged, match="shorter"):
            whole(file)


def test_a_resumed_download_tells_the_checksum_of_the_whole(tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    def kill(request: str, _key: str) -> None:
        counts[request] += 1
        if counts["chunk"] > 70:
            raise KilledError

    counts = Counter[str]()
    bucket, copy, note = MemoryBucket(kill), tmp_path / "copy", tmp_path / "note"
    data = large(bucket)
    with pytest.raises(KilledError):
        store_of(bucket).download("big", copy, version='"v1"', note=note)
    bucket.hook = lambda _request, _key: None
    assert store_of(bucket).download("big", copy, version='"v1"', note=note) == crc32c(data)


def test_who_waits_for_a_turn_at_a_store_gives_up_with_its_retries() -> None:
    stop, held, go_on = threading.Event(), threading.Event(), threading.Event()

    def hold(request: str, _key: str) -> None:
        if request == "get":
            held.set()
            go_on.wait(20)

    store = BucketStore(MemoryBucket(hold, objects={"job/k": (b"x", '"v"')}), "job/", Retry(60, stop=stop), at_once=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.read, "k")
        held.wait(20)
        second = pool.submit(store.read, "k")
        stop.set()
        try:
            with pytest.raises(StoreUnreachable, match="wait for its turn"):
                second.result(10)
        finally:
            go_on.set()
        assert first.result(10) == b"x"


def test_who_waits_for_memory_gives_up_with_its_retries() -> None:
    stop = threading.Event()
    stop.set()
    buffers = BucketStore(MemoryBucket(), "job/", Retry(60, stop=stop))._requests.buffers
    blocks = [buffers.take(10) for _ in range(BUFFERS)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffers.take, 10)
        try:
            with pytest.raises(StoreUnreachable):
                waiting.result(10)
        finally:
            buffers.give_back(blocks.pop())


def test_a_write_that_arrives_late_does_not_make_a_store_incapable() -> None:
    class Late(MemoryBucket):
        spoiled = False

        def put(self, key: str, data: Any, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
            if data == b"second" and not self.spoiled:
                self.spoiled = True
                self.objects[key] = (b"wrong", '"late"')
            return super().put(key, data, only_new=only_new, replacing=replacing)

    assert store_of(Late()).exclusive
