"""Every request of an S3 bucket, on real servers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from runner.errors import AccessDenied, ObjectChanged, ObjectExists, ObjectMissing, StoreError, StoreUnreachable
from runner.storage.bucket import Bucket, Part, Proof
from runner.storage.s3 import S3Bucket, copying
from tests.servers import Server

MIB = 1024 * 1024
PART = 5 * MIB

FreshBucket = Callable[[Server], str]


@pytest.fixture(params=["seaweedfs", "ministack", "rclone"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["seaweedfs", "ministack"])
def strict(request: pytest.FixtureRequest) -> Server:
    """Servers that honour conditions."""
    found: Server = request.getfixturevalue(request.param)
    return found


_buckets: dict[str, str] = {}


@pytest.fixture
def key() -> str:
    """A key below a prefix that nobody else uses."""
    return f"{uuid4().hex}/some key/ä+%20&.bin"


def bucket_on(server: Server, **options: Any) -> S3Bucket:
    """The bucket that all tests of one server share: making one takes SeaweedFS a second."""
    if server.endpoint not in _buckets:
        _buckets[server.endpoint] = f"shared-{uuid4().hex[:12]}"
        server.make_bucket(_buckets[server.endpoint])
    return S3Bucket(_buckets[server.endpoint], server.access(**options))


def read(bucket: Bucket, key: str, **options: Any) -> bytes:
    with bucket.get(key, **options) as answer:
        return b"".join(answer.chunks)


def test_an_s3_bucket_is_a_bucket(server: Server) -> None:
    bucket: Bucket = bucket_on(server)
    assert bucket.url.startswith("s3://shared-")


def test_what_is_put_is_got(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    info = bucket.put(key, memoryview(b"0123456789"))
    assert (info.key, info.size) == (key, 10)
    assert abs(info.modified - time.time()) < 60
    with bucket.get(key, version=info.version) as answer:
        assert (answer.size, answer.version) == (10, info.version)
        assert answer.proof == Proof("md5", "781e5e245d69b566979b86e28d23f2c7")
        assert b"".join(answer.chunks) == b"0123456789"


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(2, 3, b"234"), (6, None, b"6789"), (0, 1, b"0"), (9, 1, b"9"), (0, 10, b"0123456789")],
)
def test_a_range_is_what_was_asked_for(
    server: Server, key: str, start: int, length: int | None, expected: bytes
) -> None:
    bucket = bucket_on(server)
    bucket.put(key, b"0123456789")
    with bucket.get(key, start=start, length=length) as answer:
        assert b"".join(answer.chunks) == expected
        assert answer.size == 10
        assert answer.proof == Proof("md5", hashlib.md5(b"0123456789").hexdigest())


def test_an_empty_object(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    assert bucket.put(key, b"").size == 0
    assert read(bucket, key) == b""
    assert bucket.head(key).size == 0


def test_a_large_object_comes_in_pieces(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    data = bytes(range(256)) * (3 * MIB // 256)
    bucket.put(key, data)
    with bucket.get(key) as answer:
        pieces = [bytes(chunk) for chunk in answer.chunks]
    assert b"".join(pieces) == data
    assert len(pieces) > 3


def test_what_goes_wrong_with_the_reader_is_no_error_of_the_store(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    bucket.put(key, b"data")
    with pytest.raises(FileNotFoundError), bucket.get(key):
        raise FileNotFoundError
    with pytest.raises(ConnectionError), bucket.get(key) as answer:  # noqa: PT012  # reading is the point
        next(answer.chunks)
        raise ConnectionError


def test_head_says_what_a_listing_says(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    bucket.put(key, b"data")
    (listed,) = bucket.page(key, None).objects
    head = bucket.head(key)
    assert (head.key, head.size, head.version) == (listed.key, listed.size, listed.version) == (key, 4, head.version)
    assert int(head.modified) == int(listed.modified)


def test_what_is_missing(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    with pytest.raises(ObjectMissing):
        read(bucket, key)
    with pytest.raises(ObjectMissing):
        bucket.head(key)
    with pytest.raises(ObjectMissing):
        bucket.copy(key, f"{key}2", version=None, size=1)
    bucket.delete([key])


def test_another_version_is_refused(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    old = bucket.put(key, b"old")
    bucket.put(key, b"new")
    with pytest.raises(ObjectChanged):
        read(bucket, key, version=old.version)


def test_conditions_are_honoured(strict: Server, key: str) -> None:
    bucket = bucket_on(strict)
    first = bucket.put(key, b"first", only_new=True)
    with pytest.raises(ObjectExists):
        bucket.put(key, b"second", only_new=True)
    second = bucket.put(key, b"second", replacing=first.version)
    with pytest.raises(ObjectChanged):
        bucket.put(key, b"third", replacing=first.version)
    assert read(bucket, key, version=second.version) == b"second"
    with pytest.raises((ObjectChanged, ObjectMissing)):
        bucket.put(f"{key}2", b"x", replacing=first.version)


def test_a_store_that_ignores_conditions_overwrites(rclone: Server, key: str) -> None:
    bucket = bucket_on(rclone)
    bucket.put(key, b"first", only_new=True)
    bucket.put(key, b"second", only_new=True)
    assert read(bucket, key) == b"second"


def test_a_multipart_upload(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    upload = bucket.begin(key)
    second = bucket.put_part(key, upload, 2, memoryview(b"end"))
    first = bucket.put_part(key, upload, 1, bytearray(b"x" * PART))
    assert bucket.parts(key, upload) == [first, second]
    assert (second.number, second.size) == (2, 3)
    info = bucket.finish(key, upload, [first, second])
    assert info == bucket.head(key)
    assert info.size == PART + 3
    assert read(bucket, key, start=PART - 1, version=info.version) == b"xend"


def test_an_unfinished_upload_is_found_and_forgotten(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    upload = bucket.begin(key)
    bucket.put_part(key, upload, 1, b"x")
    (found,) = bucket.unfinished(key)
    assert (found.key, found.upload) == (key, upload)
    assert abs(found.began - time.time()) < 60
    bucket.abort(key, upload)
    bucket.abort(key, upload)
    assert list(bucket.unfinished(key)) == []
    with pytest.raises(ObjectMissing):
        bucket.parts(key, upload)
    with pytest.raises(ObjectMissing):
        bucket.put_part(key, upload, 1, b"x")
    with pytest.raises(ObjectMissing):
        bucket.finish(key, upload, [Part(1, 1, '"0cc175b9c0f1b6a831c399e269772661"')])


def test_a_copy(strict: Server, key: str) -> None:
    bucket = bucket_on(strict)
    info = bucket.put(key, b"data")
    copied = bucket.copy(key, f"{key}2", version=info.version, size=4)
    assert (copied.key, copied.size) == (f"{key}2", 4)
    assert copied.version == bucket.head(f"{key}2").version
    with pytest.raises(ObjectChanged):
        bucket.copy(key, f"{key}3", version="0" * 32, size=4)
    assert read(bucket, f"{key}2") == b"data"


def in_parts(bucket: S3Bucket) -> copying.Copier:
    """A copier for which objects are large early."""
    return copying.Copier(bucket._connection, bucket._target, {}, copying.Limits(at_once=PART, part=PART))


def test_a_copy_in_parts(strict: Server, key: str) -> None:
    bucket = bucket_on(strict)
    data = b"a" * PART + b"b" * PART + b"end"
    info = bucket.put(key, data)
    copied = in_parts(bucket).copy(key, f"{key}2", info.version, len(data))
    assert copied == bucket.head(f"{key}2")
    assert read(bucket, f"{key}2") == data


def test_a_copy_in_parts_of_another_version_leaves_nothing(seaweedfs: Server, key: str) -> None:
    bucket = bucket_on(seaweedfs)
    bucket.put(key, b"a" * PART + b"end")
    with pytest.raises(ObjectChanged):
        in_parts(bucket).copy(key, f"{key}2", "0" * 32, PART + 3)
    assert list(bucket.unfinished(key)) == []
    with pytest.raises(ObjectMissing):
        bucket.head(f"{key}2")


def test_many_are_deleted_and_the_missing_do_not_matter(server: Server, key: str) -> None:
    bucket = bucket_on(server)
    keys = [f"{key}-{number}<&>" for number in range(5)]
    for one in keys:
        bucket.put(one, b"x")
    bucket.delete([*keys[:4], f"{key}-none"])
    assert [info.key for info in bucket.page(key, None).objects] == keys[4:]


def test_pages(strict: Server, key: str) -> None:
    bucket = bucket_on(strict)
    folder = key.partition("/")[0]
    keys = {f"{folder}/{number % 7}/{number}" for number in range(1005)}
    for one in keys:
        bucket.put(one, b"x")
    first = bucket.page(f"{folder}/", None)
    assert first.next is not None
    second = bucket.page(f"{folder}/", first.next)
    assert (len(first.objects), len(second.objects), second.next) == (1000, 5, None)
    assert {info.key for info in first.objects + second.objects} == keys
    top = bucket.page(f"{folder}/", None, delimiter=True)
    assert (top.objects, sorted(top.folders), top.next) == ((), [str(number) for number in range(7)], None)
    assert bucket.page(f"{folder}/none", None).objects == ()


def test_a_versioned_bucket(strict: Server, key: str) -> None:
    name = f"versioned-{uuid4().hex[:12]}"
    strict.make_bucket(name, versioning=True)
    bucket = S3Bucket(name, strict.access())
    old, new = bucket.put(key, b"old"), bucket.put(key, b"new!")
    (listed,) = bucket.page("", None).objects
    assert (listed.version, listed.size) == (new.version, 4)
    with pytest.raises(ObjectChanged):
        read(bucket, key, version=old.version)
    bucket.delete([key])
    assert bucket.page("", None).objects == ()
    with pytest.raises(ObjectMissing):
        read(bucket, key)


def test_a_wrong_secret_is_told_with_what_to_do(seaweedfs: Server, key: str) -> None:
    wrong = {**seaweedfs.environ(), "AWS_SECRET_ACCESS_KEY": "wrong-secret"}
    bucket = bucket_on(seaweedfs, environ=wrong)
    requests: list[Callable[[], object]] = [
        lambda: bucket.page("", None),
        lambda: read(bucket, key),
        lambda: read(bucket, f"{key}//odd"),
        lambda: bucket.put(key, b"x"),
        lambda: bucket.begin(key),
        lambda: bucket.put_part(key, "1", 1, b"x"),
        lambda: bucket.delete([key]),
    ]
    for request in requests:
        with pytest.raises(AccessDenied) as caught:
            request()
        assert "check key, secret and session token" in caught.value.hint
        assert "wrong-secret" not in f"{caught.value}{caught.value.hint}"


def test_a_bucket_that_is_not_there(server: Server, key: str) -> None:
    bucket = S3Bucket("no-such-bucket", server.access())
    for request in (lambda: bucket.page("", None), lambda: read(bucket, key), lambda: bucket.put(key, b"x")):
        with pytest.raises(StoreError, match="s3://no-such-bucket does not exist") as caught:
            request()
        assert type(caught.value) is StoreError


def test_nobody_answers(seaweedfs: Server, key: str) -> None:
    bucket = S3Bucket("bucket", seaweedfs.access(endpoint="http://user:secret@127.0.0.1:1"))
    for request in (lambda: bucket.page("", None), lambda: read(bucket, key), lambda: bucket.head(key)):
        with pytest.raises(StoreUnreachable, match="onnection refused") as caught:
            request()
        assert "http://127.0.0.1:1" in caught.value.hint
        assert "secret" not in f"{caught.value}{caught.value.hint}"
