"""What goes over the wire: options on every request that needs them, nothing that strict stores refuse, proxies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import StoreBusy, StoreError, StoreUnreachable
from runner.storage.access import Access
from runner.storage.s3 import S3Bucket
from runner.storage.s3.housekeeping import region_of
from tests.servers import Server, rclone
from tests.servers.web import Reply, Seen, Web, answering, proxy

PART = 5 * 1024 * 1024
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}

FreshBucket = Callable[[Server], str]


@pytest.fixture
def way() -> Iterator[Web]:
    with proxy() as forward:
        yield forward


def through(way: Web, server: Server, name: str, environ: dict[str, str] | None = None, **options: Any) -> S3Bucket:
    proxied = {**server.environ(), "HTTP_PROXY": way.url, **(environ or {})}
    return S3Bucket(name, server.access(environ=proxied, **options))


def do_everything(bucket: S3Bucket) -> None:
    info = bucket.put("key", b"data")
    with bucket.get("key", version=info.version) as answer:
        assert b"".join(answer.chunks) == b"data"
    bucket.copy("key", "key2", version=info.version, size=4)
    upload = bucket.begin("large")
    part = bucket.put_part("large", upload, 1, b"x" * PART)
    assert bucket.parts("large", upload) == [part]
    assert len(list(bucket.unfinished(""))) == 1
    bucket.finish("large", upload, [part])
    bucket.abort("large", bucket.begin("large"))
    bucket.head("key")
    assert len(bucket.page("", None).objects) == 3
    bucket.delete(["key", "key2", "large"])


def test_all_requests_take_the_proxy(ministack: Server, way: Web, fresh_bucket: FreshBucket) -> None:
    do_everything(through(way, ministack, fresh_bucket(ministack)))
    assert {request.method for request in way.seen} == {"GET", "PUT", "POST", "HEAD", "DELETE"}
    assert len(way.seen) == 18
    assert all(request.url.startswith(ministack.endpoint) for request in way.seen)


@pytest.mark.parametrize("excluded", ["127.0.0.1", "example.com, 127.0.0.0/8", "*"])
def test_no_proxy_is_honoured(ministack: Server, way: Web, fresh_bucket: FreshBucket, excluded: str) -> None:
    do_everything(through(way, ministack, fresh_bucket(ministack), {"NO_PROXY": excluded}))
    assert way.seen == []


def test_signatures_survive_the_proxy(seaweedfs: Server, way: Web, fresh_bucket: FreshBucket) -> None:
    do_everything(through(way, seaweedfs, fresh_bucket(seaweedfs)))
    assert way.seen


def test_strict_stores_find_nothing_to_refuse(ministack: Server, way: Web, fresh_bucket: FreshBucket) -> None:
    do_everything(through(way, ministack, fresh_bucket(ministack)))
    for request in way.seen:
        told = [name for name in request.headers if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum"))]
        # Asked for where an upload begins, since this store has shown that it checks them; nowhere else.
        assert not told or "uploadId=" in request.url or request.url.endswith("?uploads")
        assert "x-amz-trailer" not in request.headers
        assert "aws-chunked" not in request.headers.get("content-encoding", "")
        signed = request.headers["x-amz-content-sha256"]
        assert len(signed) == 64 or (
            signed == "UNSIGNED-PAYLOAD" and {"content-md5", "x-amz-checksum-crc32c"} & set(request.headers)
        )
    (delete,) = [request for request in way.seen if "?delete" in request.url]
    assert delete.headers["content-md5"]


def test_requester_pays_is_on_every_request(ministack: Server, way: Web, fresh_bucket: FreshBucket) -> None:
    do_everything(through(way, ministack, fresh_bucket(ministack), requester_pays=True))
    assert [request for request in way.seen if request.headers.get("x-amz-request-payer") != "requester"] == []
    way.seen.clear()
    do_everything(through(way, ministack, fresh_bucket(ministack)))
    assert [request for request in way.seen if "x-amz-request-payer" in request.headers] == []


def test_encryption_is_asked_for_with_each_new_object(ministack: Server, way: Web, fresh_bucket: FreshBucket) -> None:
    name = fresh_bucket(ministack)
    do_everything(through(way, ministack, name, sse="aws:kms", kms_key="my-key"))
    asking = [request for request in way.seen if "x-amz-server-side-encryption" in request.headers]
    assert [(request.method, request.url.removeprefix(f"{ministack.endpoint}/{name}")) for request in asking] == [
        ("PUT", "/key"),
        ("PUT", "/key2"),
        ("POST", "/large?uploads"),
        ("POST", "/large?uploads"),
        ("POST", "/large?uploads"),
    ]
    for request in asking:
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "my-key"


def test_a_tag_is_no_digest_where_a_key_encrypts(ministack: Server, fresh_bucket: FreshBucket) -> None:
    name = fresh_bucket(ministack)
    ministack.client().put_object(Bucket=name, Key="key", Body=b"x", ServerSideEncryption="aws:kms", SSEKMSKeyId="k")
    for bucket in (S3Bucket(name, ministack.access()), S3Bucket(name, ministack.access(sse="aws:kms"))):
        with bucket.get("key") as answer:
            assert answer.proof is None
        assert bucket.proof("key", answer.version) is None


@pytest.mark.parametrize(
    ("addressing", "url"), [("virtual", "http://data.s3.invalid:1/"), ("path", "http://s3.invalid:1/data")]
)
def test_the_bucket_stands_in_the_host_name_where_it_should(way: Web, addressing: str, url: str) -> None:
    access = Access("http://s3.invalid:1", "eu-west-3", addressing, environ={**KEYS, "HTTP_PROXY": way.url})
    bucket = S3Bucket("data", access)
    requests: list[Callable[[], object]] = [
        lambda: bucket.page("", None),
        lambda: bucket.put("key", b""),
        lambda: bucket.head("key"),
    ]
    for request in requests:
        with pytest.raises(StoreUnreachable):
            request()
    assert len(way.seen) == 3
    assert all(seen.url.startswith(url) for seen in way.seen)
    assert all("/eu-west-3/s3/" in seen.headers["authorization"] for seen in way.seen)


@pytest.mark.parametrize("status", [200, 400, 403])
def test_aws_tells_the_region_also_in_a_refusal(status: int) -> None:
    with answering(lambda _: Reply(status, headers={"x-amz-bucket-region": "eu-west-3"})) as server:
        assert region_of(Server(server.url).client(), "bucket") == "eu-west-3"


def test_without_an_answer_about_the_region_it_is_the_first() -> None:
    with answering(lambda _: Reply(403)) as server:
        assert region_of(Server(server.url).client(), "bucket") == "us-east-1"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of our own for 127.0.0.1, with its key in the same file."""
    file = tmp_path / "own.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    command += ["-keyout", "key.pem", "-out", "certificate.pem", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    file.write_text((tmp_path / "certificate.pem").read_text() + (tmp_path / "key.pem").read_text())
    return file


def test_certificates_are_verified_and_own_ones_can_be_trusted(certificate: Path, fresh_bucket: FreshBucket) -> None:
    with rclone(certificate) as server:
        name = fresh_bucket(server)
        trusting = {**server.environ(), "AWS_CA_BUNDLE": str(certificate.with_name("certificate.pem"))}
        do_everything(S3Bucket(name, server.access(environ=trusting)))
        stranger = S3Bucket(name, server.access())
        requests: list[Callable[[], object]] = [
            lambda: stranger.page("", None),
            lambda: stranger.put("key", b""),
            lambda: stranger.head("key"),
        ]
        for request in requests:
            with pytest.raises(StoreUnreachable, match="ertificate"):
                request()


def test_a_file_of_certificates_that_is_not_there() -> None:
    bucket = S3Bucket("b", Access("https://127.0.0.1:1", "x", environ={**KEYS, "AWS_CA_BUNDLE": "/no/such/file"}))
    with pytest.raises(StoreError, match="cannot read the certificates in /no/such/file") as caught:
        bucket.put("key", b"")
    assert "AWS_CA_BUNDLE" in caught.value.hint


def test_a_body_that_is_cut_off_raises() -> None:
    def reply(request: Seen) -> Reply:
        headers = {"ETag": '"abc"', "Last-Modified": "Mon, 30 Nov 2026 19:42:37 GMT"}
        return Reply(body=b"0123456789", headers=headers, length=2_000_000 if "large" in request.url else 11)

    with answering(reply) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        for key in ("small", "large", "odd//key", "odd//large"):
            with pytest.raises(StoreUnreachable), bucket.get(key) as answer:  # reading is the point
                for _ in answer.chunks:
                    pass


@pytest.mark.parametrize("key", ["key", "odd//key"])
def test_fewer_bytes_than_asked_for_raise(key: str) -> None:
    headers = {"ETag": '"abc"', "Last-Modified": "Mon, 30 Nov 2026 19:42:37 GMT", "Content-Range": "bytes 2-4/10"}
    with answering(lambda _: Reply(206, b"234", headers)) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(StoreUnreachable), bucket.get(key, start=2, length=5) as answer:
            b"".join(answer.chunks)


@pytest.mark.parametrize("key", ["key", "odd//key"])
def test_the_store_is_busy(key: str) -> None:
    body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
    with answering(lambda _: Reply(503, body)) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(StoreBusy, match="Reduce your request rate"), bucket.get(key):
            pass
        assert len(server.seen) == 1


def test_a_conflict_of_writers_is_no_object_that_exists() -> None:
    with answering(lambda _: Reply(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(StoreUnreachable, match="ConditionalRequestConflict"):
            bucket.put("key", b"x", only_new=True)


def test_a_failure_inside_a_success_is_a_failure() -> None:
    body = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We failed.</Message></Error>'
    with answering(lambda _: Reply(200, body)) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(StoreUnreachable, match="InternalError"):
            bucket.finish("key", "upload", [])
        with pytest.raises(StoreUnreachable, match="InternalError"):
            bucket.copy("key", "key2", version=None, size=1)
        with pytest.raises(StoreUnreachable, match="InternalError"):
            bucket.delete(["key"])


def test_where_nothing_deletes_in_bulk_it_is_done_singly() -> None:
    def reply(request: Seen) -> Reply:
        if request.method == "POST":
            return Reply(501, b"<Error><Code>NotImplemented</Code></Error>")
        return Reply(404 if "none" in request.url else 204)

    with answering(reply) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        bucket.delete(["a", "b", "none"])
        bucket.delete(["c"])
        assert [request.method for request in server.seen] == ["POST", *["DELETE"] * 4]


def test_a_refused_deletion_raises() -> None:
    body = b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code><Message>No</Message></Error></DeleteResult>"
    with answering(lambda _: Reply(200, body)) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=KEYS))
        with pytest.raises(StoreError, match="AccessDenied") as caught:
            bucket.delete(["k"])
        assert "s3:DeleteObject" in caught.value.hint
        assert "s3://bucket/k" in caught.value.hint


def test_the_command_line_loads_without_the_clients() -> None:
    code = "import sys, runner.cli.main; print(sorted({'boto3', 'botocore', 'obstore'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
