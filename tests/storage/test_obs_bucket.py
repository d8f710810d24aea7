"""An OBS bucket, request by request: by name and by path, on a server of OBS's own kind and on two of S3's."""

from __future__ import annotations

import hashlib
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from runner.errors import (
    AccessDenied,
    BadKey,
    ClockSkewed,
    CredentialsExpired,
    ObjectChanged,
    ObjectMissing,
    StoreBusy,
    StoreError,
    StoreUnreachable,
)
from runner.storage.access import Access
from runner.storage.bucket import Bucket, Proof
from runner.storage.obs.bucket import ObsBucket
from tests.faults.plans import Fault, Kind, Once
from tests.faults.proxy import spoiling
from tests.servers import Server
from tests.servers.obs import Credential, ObsServer, Reply, Request, Work, obs_server

MIB = 1 << 20
WAYS = ["by name", "by path", "seaweedfs", "ministack"]


@pytest.fixture(scope="module")
def server() -> Iterator[ObsServer]:
    with obs_server() as running:
        yield running


@pytest.fixture
def name(server: ObsServer) -> str:
    fresh = f"b{uuid4().hex[:12]}"
    server.make_bucket(fresh)
    return fresh


def access_to_s3(server: Server) -> Access:
    keys = {"OBS_ACCESS_KEY_ID": server.access_key, "OBS_SECRET_ACCESS_KEY": server.secret_key}
    return Access(endpoint=server.endpoint, environ=keys)


@pytest.fixture(params=WAYS)
def bucket(
    request: pytest.FixtureRequest, server: ObsServer, name: str, fresh_bucket: Callable[[Server], str]
) -> Bucket:
    if request.param in ("seaweedfs", "ministack"):
        other: Server = request.getfixturevalue(request.param)
        return ObsBucket(fresh_bucket(other), access_to_s3(other))
    endpoint = server.virtual if request.param == "by name" else server.endpoint
    return ObsBucket(name, server.access(endpoint=endpoint))


@pytest.fixture
def plain(server: ObsServer, name: str) -> ObsBucket:
    return ObsBucket(name, server.access(endpoint=server.virtual))


def content(bucket: Bucket, key: str, **options: int) -> bytes:
    with bucket.get(key, **options) as answer:  # type: ignore[arg-type]
        return b"".join(answer.chunks)


def keys(bucket: Bucket, prefix: str = "") -> list[str]:
    return [info.key for info in bucket.page(prefix, None).objects]


def last(server: ObsServer, bucket: Bucket) -> Request:
    return [one for one in server.requests if one.bucket == bucket.url.removeprefix("obs://")][-1]


@contextmanager
def answering(status: bytes, body: bytes) -> Iterator[str]:
    """The endpoint of a server that gives one answer to everything."""

    class Parrot(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.wfile.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

        do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - http.server's names

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Parrot)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


# Each request


def test_what_was_put_is_there(bucket: Bucket) -> None:
    info = bucket.put("a/b c", b"hello")
    assert (info.key, info.size, info.version) == ("a/b c", 5, hashlib.md5(b"hello").hexdigest())
    assert abs(info.modified - datetime.now(UTC).timestamp()) < 60
    assert bucket.head("a/b c") == info
    assert bucket.page("", None).objects == (info,)
    with bucket.get("a/b c", version=info.version) as answer:
        assert (answer.size, answer.version) == (5, info.version)
        assert answer.proof == Proof("md5", info.version)
        assert b"".join(answer.chunks) == b"hello"


def test_what_the_store_knows_of_the_content(bucket: Bucket) -> None:
    old = bucket.put("k", b"old").version
    new = bucket.put("k", b"new").version
    assert bucket.proof("k", new) == Proof("md5", hashlib.md5(b"new").hexdigest())
    assert bucket.proof("k", old) is None
    with pytest.raises(ObjectMissing):
        bucket.proof("nothing", old)


def test_an_empty_object(bucket: Bucket) -> None:
    assert bucket.put("k", b"").size == 0
    for _ in range(3):
        assert content(bucket, "k") == b""
    assert bucket.page("", None).objects[0].size == 0


def test_ranges(bucket: Bucket) -> None:
    data = bytes(range(256)) * 4096
    bucket.put("k", memoryview(data))
    assert content(bucket, "k") == data
    assert content(bucket, "k", start=1000) == data[1000:]
    assert content(bucket, "k", start=5, length=10) == data[5:15]
    with bucket.get("k", start=len(data) - 3, length=100) as answer:
        assert answer.size == len(data)
        assert b"".join(answer.chunks) == data[-3:]


def test_another_version_is_refused(bucket: Bucket) -> None:
    old = bucket.put("k", b"old").version
    new = bucket.put("k", b"new").version
    with pytest.raises(ObjectChanged), bucket.get("k", version=old, start=1, length=1):
        pass
    with bucket.get("k", version=new, start=1, length=1) as answer:
        assert b"".join(answer.chunks) == b"e"


def test_what_is_missing(bucket: Bucket) -> None:
    with pytest.raises(ObjectMissing), bucket.get("nothing"):
        pass
    with pytest.raises(ObjectMissing):
        bucket.head("nothing")
    with pytest.raises(ObjectMissing):
        bucket.copy("nothing", "k", version=None, size=1)
    bucket.delete(["nothing", "nothing else"])
    bucket.delete([])
    assert bucket.page("", None).objects == ()


def test_pages_and_folders(bucket: Bucket) -> None:
    names = [f"d{number % 3}/{number:04d}" for number in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: bucket.put(key, b"x"), [*names, "d", "e"]))
    first = bucket.page("d", None)
    assert first.next is not None
    second = bucket.page("d", first.next)
    assert second.next is None
    assert sorted(info.key for page in (first, second) for info in page.objects) == sorted([*names, "d"])
    page = bucket.page("", None, delimiter=True)
    assert (sorted(page.folders), [info.key for info in page.objects]) == (["d0", "d1", "d2"], ["d", "e"])
    assert bucket.page("d0/", None, delimiter=True).folders == ()
    bucket.delete(names[:1000])
    assert len(keys(bucket, "d")) == 101


def test_many_parts_become_one_object(bucket: Bucket) -> None:
    upload = bucket.begin("big")
    data = [bytes([number]) * 5 * MIB for number in (1, 2)] + [b"end"]
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda n: bucket.put_part("big", upload, n, data[n - 1]), (1, 2, 3)))
    assert bucket.parts("big", upload) == parts
    assert [(part.number, part.size) for part in parts] == [(1, 5 * MIB), (2, 5 * MIB), (3, 3)]
    [left] = bucket.unfinished("b")
    assert (left.key, left.upload) == ("big", upload)
    assert abs(left.began - datetime.now(UTC).timestamp()) < 60
    info = bucket.finish("big", upload, parts)
    assert info.version == hashlib.md5(b"".join(bytes.fromhex(part.tag) for part in parts)).hexdigest() + "-3"
    assert bucket.page("", None).objects == (info,)
    with bucket.get("big") as answer:
        assert answer.proof is None
        assert b"".join(answer.chunks) == b"".join(data)
    assert list(bucket.unfinished("")) == []


def test_an_upload_that_is_forgotten(bucket: Bucket) -> None:
    upload = bucket.begin("big")
    part = bucket.put_part("big", upload, 1, b"x")
    bucket.abort("big", upload)
    bucket.abort("big", upload)
    with pytest.raises(ObjectMissing):
        bucket.parts("big", upload)
    with pytest.raises(ObjectMissing):
        bucket.put_part("big", upload, 2, b"x")
    with pytest.raises(ObjectMissing):
        bucket.finish("big", upload, [part])
    assert keys(bucket) == []


def test_a_copy_is_of_the_version_that_was_meant(bucket: Bucket) -> None:
    old = bucket.put("k", b"old").version
    new = bucket.put("k", b"new").version
    with pytest.raises(ObjectChanged):
        bucket.copy("k", "copy", version=old, size=3)
    assert keys(bucket) == ["k"]
    info = bucket.copy("k", "a b/ü%+", version=new, size=3)
    assert bucket.head("a b/ü%+") == info
    assert content(bucket, "a b/ü%+") == b"new"


@pytest.mark.parametrize("key", [" blanks ", "percent%20%", "plus+&amp;", "ü/數據/🚀", "hash#?a=b", "'\"<>`$", "~t"])
def test_odd_keys(bucket: Bucket, key: str) -> None:
    info = bucket.put(key, b"odd")
    assert bucket.page(key, None).objects == (info,)
    assert content(bucket, key) == b"odd"
    bucket.delete([key])
    assert keys(bucket) == []


# Keys of others


@pytest.mark.parametrize("key", ["a//b", "/abs", "../x", "d/", "a/./b", "new\nline", "re\rturn", "bell\x07", "tab\t"])
def test_keys_that_we_would_not_make_are_listed_and_read_exactly(
    server: ObsServer, plain: ObsBucket, name: str, key: str
) -> None:
    plain.put("k", b"odd")
    server.buckets[name].objects[key] = server.buckets[name].objects.pop("k")
    assert keys(plain) == [key]
    assert content(plain, key) == b"odd"


def test_a_prefix_of_blanks_is_a_prefix(plain: ObsBucket) -> None:
    plain.put("k", b"")
    plain.put("  k", b"")
    assert keys(plain, " ") == ["  k"]


def test_the_sdk_cannot_copy_from_every_key(plain: ObsBucket) -> None:
    with pytest.raises(BadKey):
        plain.copy("a?versionId=b", "k", version=None, size=1)


# Conditions, and large copies


def test_conditions_are_sent(server: ObsServer, plain: ObsBucket) -> None:
    first = plain.put("k", b"first", only_new=True)
    assert last(server, plain).headers["if-none-match"] == "*"
    assert plain.put("k", b"other", only_new=True).version != first.version  # this store does not heed them
    plain.put("k", b"third", replacing=first.version)
    assert last(server, plain).headers["if-match"] == first.version


def test_conditions_are_told_where_they_are_heeded() -> None:
    with obs_server(conditions=True) as server:
        server.make_bucket("b")
        bucket = ObsBucket("b", server.access(endpoint=server.virtual))
        info = bucket.put("k", b"first", only_new=True)
        with pytest.raises(ObjectChanged):
            bucket.put("k", b"other", only_new=True)
        with pytest.raises(ObjectMissing):
            bucket.put("nothing", b"other", replacing=info.version)
        second = bucket.put("k", b"second", replacing=info.version)
        with pytest.raises(ObjectChanged):
            bucket.put("k", b"third", replacing=info.version)
        assert bucket.head("k").version == second.version


class Heedless(Work):
    """Knows no conditions at all."""

    def get(self) -> Reply:
        self.request = replace(self.request, headers=without(self.request, "if-match"))
        return super().get()

    def put_part(self) -> Reply:
        self.request = replace(self.request, headers=without(self.request, "x-obs-copy-source-if-match"))
        return super().put_part()


def without(request: Request, header: str) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name != header}


def test_another_version_is_noticed_where_the_store_does_not() -> None:
    with obs_server(work=Heedless) as server:
        server.make_bucket("b")
        bucket = ObsBucket("b", server.access(endpoint=server.virtual), copy_at_once=200_000)
        bucket.put("k", b"x" * 300_000)
        with pytest.raises(ObjectChanged), bucket.get("k", version="0" * 32):
            pass
        with pytest.raises(ObjectChanged):
            bucket.copy("k", "copy", version="0" * 32, size=300_000)
        assert keys(bucket) == ["k"]
        assert list(bucket.unfinished("")) == []


def test_what_is_too_large_for_one_request_is_copied_in_parts(server: ObsServer, name: str) -> None:
    data = bytes(range(250)) * 2000
    bucket = ObsBucket(name, server.access(endpoint=server.virtual), copy_at_once=200_000)
    info = bucket.put("k", data)
    made = bucket.copy("k", "copy", version=info.version, size=len(data))
    assert (made.size, made.version.rpartition("-")[2]) == (len(data), "3")
    assert content(bucket, "copy") == data
    with pytest.raises(ObjectChanged):
        bucket.copy("k", "again", version="0" * 32, size=len(data))
    assert list(bucket.unfinished("")) == []
    assert keys(bucket) == ["copy", "k"]


# What goes with every request


def test_buckets_by_name_get_obss_own_signature(server: ObsServer, plain: ObsBucket, name: str) -> None:
    plain.page("", None)
    assert (last(server, plain).scheme, last(server, plain).host) == ("OBS", f"{name}.obs.localhost")
    ObsBucket(name, server.access()).page("", None)  # by path the SDK knows only that of S3
    assert (last(server, plain).scheme, last(server, plain).host) == ("AWS", "127.0.0.1")


def test_encryption_is_asked_for(server: ObsServer, name: str) -> None:
    access = server.access(endpoint=server.virtual, sse="aws:kms", kms_key="the-key")
    bucket = ObsBucket(name, access)
    bucket.put("k", b"x")
    assert last(server, bucket).headers["x-obs-server-side-encryption"] == "kms"
    assert last(server, bucket).headers["x-obs-server-side-encryption-kms-key-id"] == "the-key"
    with bucket.get("k") as answer:
        assert answer.proof is None
        assert bucket.proof("k", answer.version) is None
        assert b"".join(answer.chunks) == b"x"
    bucket.begin("big")
    assert last(server, bucket).headers["x-obs-server-side-encryption"] == "kms"
    ObsBucket(name, replace(access, endpoint=server.endpoint)).put("k", b"x")
    assert last(server, bucket).headers["x-amz-server-side-encryption"] == "aws:kms"
    assert last(server, bucket).headers["x-amz-server-side-encryption-aws-kms-key-id"] == "the-key"
    ObsBucket(name, replace(access, sse="AES256", kms_key=None)).put("k", b"x")
    assert last(server, bucket).headers["x-obs-server-side-encryption"] == "AES256"


def test_the_requester_pays_when_told_so(server: ObsServer, name: str) -> None:
    bucket = ObsBucket(name, server.access(endpoint=server.virtual, requester_pays=True))
    bucket.page("", None)
    assert last(server, bucket).headers["x-obs-request-payer"] == "requester"


def test_bytes_are_proved_on_their_way_in(server: ObsServer, plain: ObsBucket, name: str) -> None:
    with spoiling(server.endpoint, Once(Fault(Kind.FLIP_REQUEST))) as proxy:
        bucket = ObsBucket(name, server.access(endpoint=proxy.endpoint))
        with pytest.raises(StoreUnreachable, match="BadDigest"):
            bucket.put("k", b"x" * 1000)
    assert keys(plain) == []


def test_connections_are_used_again(server: ObsServer, plain: ObsBucket) -> None:
    plain.put("k", b"x" * MIB)
    plain.put("empty", b"")
    for _ in range(3):
        content(plain, "k")
        content(plain, "empty")
        with pytest.raises(ObjectMissing):
            plain.head("nothing")
    assert plain._client.connHolder["connSet"].qsize() == 1


def test_an_answer_that_nobody_read_to_the_end_spoils_no_other(plain: ObsBucket) -> None:
    plain.put("k", b"x" * 4 * MIB)
    for _ in range(3):
        with plain.get("k") as answer:
            next(answer.chunks)
        assert plain.head("k").size == 4 * MIB


def test_a_caller_that_raises_keeps_its_own_error(plain: ObsBucket) -> None:
    plain.put("k", b"x" * MIB)
    with pytest.raises(ZeroDivisionError), plain.get("k") as answer:  # noqa: PT012 - see below
        for _ in answer.chunks:
            raise ZeroDivisionError


def test_a_connection_that_the_server_has_closed_is_not_used_again(server: ObsServer, name: str) -> None:
    with spoiling(server.endpoint, lambda _: None) as proxy:
        bucket = ObsBucket(name, server.access(endpoint=proxy.endpoint))
        bucket.put("k", b"x")
        proxy.close()
    idle = bucket._client.connHolder["connSet"]
    assert idle.qsize() == 1
    with pytest.raises(StoreUnreachable, match="refused"):  # it asks anew, and nobody is there
        bucket.head("k")
    assert idle.qsize() == 0


def test_many_threads_at_once(server: ObsServer, plain: ObsBucket) -> None:
    def work(number: int) -> None:
        for turn in range(6):
            key, data = f"{number}/{turn}", bytes([number]) * (number * 1000 + turn)
            info = plain.put(key, data)
            with plain.get(key, version=info.version) as answer:
                assert b"".join(answer.chunks) == data
            with plain.get(key, start=turn, length=7) as answer:
                assert b"".join(answer.chunks) == data[turn : turn + 7]
            assert plain.page(f"{number}/", None).objects[-1] == info
        plain.delete([f"{number}/{turn}" for turn in range(6)])

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(1, 33)))
    assert keys(plain) == []


# Refusals


def test_a_wrong_secret(server: ObsServer, name: str) -> None:
    for endpoint in (server.virtual, server.endpoint):
        wrong = {**server.environ(), "OBS_SECRET_ACCESS_KEY": "something-else"}
        bucket = ObsBucket(name, server.access(endpoint=endpoint, environ=wrong))
        with pytest.raises(AccessDenied) as caught:
            bucket.put("k", b"x")
        assert "SignatureDoesNotMatch" in caught.value.message
        assert "something-else" not in f"{caught.value.message} {caught.value.hint}"


def test_a_wrong_secret_on_seaweedfs(seaweedfs: Server, fresh_bucket: Callable[[Server], str]) -> None:
    access = access_to_s3(replace(seaweedfs, secret_key="wrong"))
    with pytest.raises(AccessDenied):
        ObsBucket(fresh_bucket(seaweedfs), access).page("", None)


def test_a_key_that_nobody_knows(server: ObsServer, name: str) -> None:
    environ = {**server.environ(), "OBS_ACCESS_KEY_ID": "NOBODY"}
    with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
        ObsBucket(name, server.access(endpoint=server.virtual, environ=environ)).page("", None)


def test_a_right_that_is_missing(server: ObsServer, name: str) -> None:
    server.credentials["READER"] = Credential("reads", may=frozenset({"GET", "HEAD"}))
    environ = {"OBS_ACCESS_KEY_ID": "READER", "OBS_SECRET_ACCESS_KEY": "reads"}
    bucket = ObsBucket(name, server.access(endpoint=server.virtual, environ=environ))
    assert keys(bucket) == []
    with pytest.raises(AccessDenied) as caught:
        bucket.put("k", b"x")
    assert "obs:object:PutObject" in caught.value.hint


def test_a_missing_bucket(server: ObsServer, seaweedfs: Server) -> None:
    for access in (server.access(endpoint=server.virtual), server.access(), access_to_s3(seaweedfs)):
        bucket = ObsBucket("no-such-bucket", access)
        with pytest.raises(StoreError, match="does not exist") as caught:
            bucket.page("some/prefix", None)
        assert not isinstance(caught.value, ObjectMissing)
        with pytest.raises(StoreError, match="does not exist"), bucket.get("k"):
            pass


def test_one_key_of_many_that_cannot_be_deleted(server: ObsServer, name: str) -> None:
    body = (
        b"<DeleteResult><Error><Key>b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        b"<Error><Key>c</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    with answering(b"200 OK", body) as endpoint:
        bucket = ObsBucket(name, server.access(endpoint=endpoint))
        with pytest.raises(AccessDenied, match=f"obs://{name}/b"):
            bucket.delete(["a", "b", "c"])


# What the network does


@pytest.mark.parametrize("kind", [Kind.CUT_ANSWER, Kind.RESET_ANSWER, Kind.LONGER])
def test_a_body_that_breaks_off(server: ObsServer, plain: ObsBucket, name: str, kind: Kind) -> None:
    plain.put("k", b"x" * MIB)
    with spoiling(server.endpoint, Once(Fault(kind, 0.7))) as proxy:
        bucket = ObsBucket(name, server.access(endpoint=proxy.endpoint))
        came = 0
        with pytest.raises(StoreUnreachable), bucket.get("k") as answer:  # noqa: PT012 - the chunks raise
            for chunk in answer.chunks:
                came += len(chunk)
        assert came <= MIB
        assert content(bucket, "k") == b"x" * MIB


def test_a_range_that_is_shorter_than_asked_for(server: ObsServer, plain: ObsBucket, name: str) -> None:
    plain.put("k", b"x" * MIB)
    with spoiling(server.endpoint, Once(Fault(Kind.TRUNCATED))) as proxy:
        bucket = ObsBucket(name, server.access(endpoint=proxy.endpoint))
        with pytest.raises(StoreUnreachable, match="another range"), bucket.get("k", start=0, length=MIB):
            pass


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Kind.ERROR_500, StoreUnreachable),
        (Kind.SLOW_DOWN, StoreBusy),
        (Kind.TOO_MANY, StoreBusy),
        (Kind.SKEWED, ClockSkewed),
        (Kind.EXPIRED, CredentialsExpired),
        (Kind.EXPIRED_403, CredentialsExpired),
        (Kind.GARBAGE, StoreUnreachable),
        (Kind.PORTAL, StoreUnreachable),
        (Kind.CUT_REQUEST, StoreUnreachable),
        (Kind.RESET_REQUEST, StoreUnreachable),
        (Kind.LANDED, StoreUnreachable),
        (Kind.LANDED_500, StoreUnreachable),
    ],
)
def test_each_request_is_tried_once(server: ObsServer, name: str, kind: Kind, error: type[StoreError]) -> None:
    calls: list[Callable[[ObsBucket], object]] = [
        lambda bucket: bucket.put("k", b"x" * 1000),
        lambda bucket: bucket.page("", None),
    ]
    for call in calls:
        with spoiling(server.endpoint, Once(Fault(kind))) as proxy:
            bucket = ObsBucket(name, server.access(endpoint=proxy.endpoint), timeout=5)
            with pytest.raises(error) as caught:
                call(bucket)
            assert caught.value.retryable
            assert len(proxy.seen) == 1
            call(bucket)


@pytest.mark.parametrize("kind", [Kind.STALL_REQUEST, Kind.STALL_ANSWER])
def test_a_stall_is_not_waited_for(server: ObsServer, plain: ObsBucket, name: str, kind: Kind) -> None:
    plain.put("k", b"x" * MIB)
    with spoiling(server.endpoint, Once(Fault(kind))) as proxy:
        bucket = ObsBucket(name, server.access(endpoint=proxy.endpoint), timeout=0.5)
        with pytest.raises(StoreUnreachable):
            content(bucket, "k")
        assert content(bucket, "k") == b"x" * MIB


def test_nobody_is_there() -> None:
    access = Access(endpoint="http://127.0.0.1:9", environ={"OBS_ACCESS_KEY_ID": "a", "OBS_SECRET_ACCESS_KEY": "b"})
    with pytest.raises(StoreUnreachable, match="refused"):
        ObsBucket("b", access).page("", None)


@pytest.mark.parametrize("body", [b"<Error><Code>InternalError</Code></Error>", b"", b"<html/>"])
def test_status_200_alone_is_no_success(server: ObsServer, name: str, body: bytes) -> None:
    with answering(b"200 OK", body) as endpoint:
        bucket = ObsBucket(name, server.access(endpoint=endpoint))
        calls: list[Callable[[], object]] = [
            lambda: bucket.copy("a", "b", version=None, size=1),
            lambda: bucket.finish("a", "upload", []),
            lambda: bucket.begin("a"),
            lambda: bucket.put("a", b"x"),
            lambda: bucket.put_part("a", "upload", 1, b"x"),
            lambda: bucket.parts("a", "upload"),
            lambda: bucket.page("", None),
            lambda: list(bucket.unfinished("")),
            lambda: bucket.delete(["a"]),
        ]
        for call in calls:
            with pytest.raises(StoreUnreachable):
                call()


@pytest.mark.parametrize(
    "body",
    [
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextMarker>same</NextMarker></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextMarker>z</NextMarker>%s</ListBucketResult>"
        % b"<CommonPrefixes><Prefix>same</Prefix></CommonPrefixes>",
    ],
)
def test_a_listing_that_does_not_advance(server: ObsServer, name: str, body: bytes) -> None:
    with answering(b"200 OK", body) as endpoint:
        bucket = ObsBucket(name, server.access(endpoint=endpoint))
        with pytest.raises(StoreError, match="does not advance") as caught:
            bucket.page("", "same")
        assert not caught.value.retryable


# Parallel file systems


def test_a_parallel_file_system_is_listed_to_its_end() -> None:
    with obs_server(pfs=True) as server:
        server.make_bucket("b")
        bucket = ObsBucket("b", server.access(endpoint=server.virtual))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: bucket.put(f"{number:04d}", b"x"), range(1050)))
        first = bucket.page("", None)
        assert first.next == "0999"
        assert [info.key for info in bucket.page("", first.next).objects] == [
            f"{number}" for number in range(1000, 1050)
        ]
        assert all("encoding-type" not in request.parameters for request in server.requests)


def test_a_parallel_file_system_that_repeats_itself_is_noticed() -> None:
    with obs_server(pfs=True) as server:
        server.make_bucket("b")
        bucket = ObsBucket("b", server.access(endpoint=server.virtual))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: bucket.put(f"{number:04d}", b"x"), range(1050)))
        server.buckets["b"].objects["0000\x01"] = server.buckets["b"].objects["0000"]  # XML cannot carry it
        first = bucket.page("", None)
        assert first.next is not None
        assert [info.key for info in bucket.page("", first.next).objects][:1] == ["0999"]


# Certificates, proxies, endpoints


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {host: certificate(tmp_path, host) for host in ("b.obs.localhost", "elsewhere.localhost")}
    for host, (certificate_file, key_file) in files.items():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_file, key_file)
        with obs_server(tls=context) as server:
            server.make_bucket("b")
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            with pytest.raises(StoreError, match="not to be trusted"):
                ObsBucket("b", server.access(endpoint=server.virtual)).page("", None)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file))
            bucket = ObsBucket("b", server.access(endpoint=server.virtual))
            if host == "b.obs.localhost":
                assert bucket.put("k", b"x").size == 1
            else:
                with pytest.raises(StoreError, match="not to be trusted"):
                    bucket.page("", None)


def certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate for ``host`` that vouches for itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / f"{host}.crt", folder / f"{host}.key"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    return certificate_file, key_file


def test_a_proxy_is_used(server: ObsServer, name: str) -> None:
    environ = {**server.environ(), "HTTP_PROXY": server.endpoint}
    access = Access(endpoint="http://obs.localhost:81", environ=environ)
    bucket = ObsBucket(name, access)
    assert bucket.put("k", b"x").size == 1
    assert content(bucket, "k") == b"x"
    with pytest.raises(StoreUnreachable):
        ObsBucket(name, replace(access, environ={**environ, "NO_PROXY": ".localhost"})).page("", None)


def test_without_the_sdk_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, server: ObsServer) -> None:
    monkeypatch.delitem(sys.modules, "runner.storage.obs.sdk", raising=False)
    monkeypatch.delattr("runner.storage.obs.sdk", raising=False)
    monkeypatch.setitem(sys.modules, "obs", None)
    with pytest.raises(StoreError, match="not installed") as caught:
        ObsBucket("b", server.access())
    assert caught.value.hint == "pip install 'cloudrun[obs]'"
