"""What a store checks of a body: found out by sending it what does not match."""

from __future__ import annotations

import base64
import hashlib

import pytest

from runner.errors import AccessDenied, NotOffered, StoreError, StoreUnreachable
from runner.storage.access import Access
from runner.storage.s3.arrival import TEST_BODY, Arrival
from runner.storage.s3.bucket import S3Bucket
from tests.servers import Server
from tests.servers.web import Reply, Seen, answering
from tests.storage.test_s3_wire import KEYS, FreshBucket

BEGUN = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
PART = 5 << 20


def refusal(code: str) -> bytes:
    return f"<Error><Code>{code}</Code></Error>".encode()


@pytest.mark.parametrize(
    ("server", "found"),
    [("seaweedfs", Arrival.CRC32C), ("ministack", Arrival.CRC32C), ("moto", Arrival.TAG), ("rclone", Arrival.MD5)],
)
def test_real_stores(request: pytest.FixtureRequest, server: str, found: Arrival, fresh_bucket: FreshBucket) -> None:
    store: Server = request.getfixturevalue(server)
    bucket = S3Bucket(fresh_bucket(store), store.access())
    assert bucket._arrival.found("key") is found
    assert list(bucket.unfinished("")) == []
    assert bucket.page("", None).objects == ()


@pytest.mark.parametrize("server", ["seaweedfs", "ministack"])
def test_the_finished_object_is_whole(request: pytest.FixtureRequest, server: str, fresh_bucket: FreshBucket) -> None:
    store: Server = request.getfixturevalue(server)
    bucket = S3Bucket(fresh_bucket(store), store.access())
    upload = bucket.begin("key")
    pieces = [b"a" * PART, b"b" * 7]
    parts = [bucket.put_part("key", upload, number, piece) for number, piece in enumerate(pieces, 1)]
    assert all(part.crc32c is not None for part in parts)
    info = bucket.finish("key", upload, parts)
    with bucket.get("key", version=info.version) as answer:
        assert b"".join(answer.chunks) == b"".join(pieces)


class Store:
    """Answers the test of what it checks; ``refused`` are the headers that it refuses, and how."""

    def __init__(self, refused: dict[str, tuple[int, bytes]], tag: str = "abc-1") -> None:
        self.refused = refused
        self.tag = tag

    def __call__(self, request: Seen) -> Reply:
        for name, (status, body) in self.refused.items():
            if name in request.headers:
                return Reply(status, body)
        if request.method == "POST":
            return Reply(body=BEGUN)
        return Reply(headers={"ETag": f'"{self.tag}"'}) if request.method == "PUT" else Reply(204)


def arrival_of(store: Store) -> Arrival:
    with answering(store) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        return bucket._arrival.found("key")


CRC, MD5, ALGORITHM = "x-amz-checksum-crc32c", "content-md5", "x-amz-checksum-algorithm"


@pytest.mark.parametrize(
    ("refused", "tag", "found"),
    [
        ({CRC: (400, refusal("BadDigest"))}, "abc-1", Arrival.CRC32C),
        ({CRC: (400, refusal("InvalidRequest")), MD5: (400, refusal("BadDigest"))}, "abc-1", Arrival.MD5),
        ({ALGORITHM: (400, refusal("InvalidArgument")), MD5: (400, refusal("InvalidDigest"))}, "abc-1", Arrival.MD5),
        ({ALGORITHM: (501, refusal("NotImplemented"))}, "abc-1", Arrival.NOTHING),
        ({}, hashlib.md5(TEST_BODY, usedforsecurity=False).hexdigest(), Arrival.TAG),
        ({}, "abc-1", Arrival.NOTHING),
    ],
)
def test_what_each_refusal_means(refused: dict[str, tuple[int, bytes]], tag: str, found: Arrival) -> None:
    assert arrival_of(Store(refused, tag)) is found


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, b"", StoreUnreachable),
        (400, b"<Error><Code>BadDi", StoreUnreachable),
        (503, refusal("SlowDown"), StoreUnreachable),
        (400, refusal("RequestTimeTooSkewed"), StoreUnreachable),
        (403, refusal("AccessDenied"), AccessDenied),
    ],
)
def test_trouble_is_no_answer(status: int, body: bytes, error: type[Exception]) -> None:
    store = Store({CRC: (status, body)})
    with answering(store) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(error):
            bucket.begin("key")
        store.refused = {CRC: (400, refusal("BadDigest"))}
        assert bucket._arrival.found("key") is Arrival.CRC32C


def test_a_store_that_begins_no_upload_at_all_is_said() -> None:
    store = Store({"authorization": (501, refusal("NotImplemented"))})
    with answering(store) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(NotOffered):
            bucket.begin("key")
        store.refused = {CRC: (400, refusal("BadDigest"))}
        assert bucket._arrival.found("key") is Arrival.CRC32C


def test_a_missing_bucket_is_no_store_without_checksums() -> None:
    with answering(Store({ALGORITHM: (404, refusal("NoSuchKey"))})) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(StoreError, match="does not exist"):
            bucket.begin("key")


def test_a_conditional_write_brings_its_digest() -> None:
    with answering(lambda _: Reply(headers={"ETag": '"abc-1"'})) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        bucket.put("k", b"x", only_new=True)
        bucket.put("k", b"x", replacing="v")
    md5 = base64.b64encode(hashlib.md5(b"x", usedforsecurity=False).digest()).decode()
    assert [seen.headers.get("content-md5") for seen in server.seen if seen.method == "PUT"] == [md5, md5]


def test_a_store_that_was_misunderstood_once_is_asked_the_quick_way_again() -> None:
    def reply(seen: Seen) -> Reply:
        whole = {"ETag": '"abc-1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if seen is server.seen[0]:
            return Reply(200, b"abcd", whole)
        return Reply(206, b"bc", {**whole, "Content-Range": "bytes 1-2/4"})

    with answering(reply) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with bucket.get("k", start=1, length=2) as answer:
            assert b"".join(answer.chunks) == b"bc"
        assert not bucket._reader._ranges_exactly
