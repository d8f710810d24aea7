"""Listings: every key exactly as it is called, and no listing that just ends early."""

from __future__ import annotations

from collections.abc import Callable
from xml.sax.saxutils import escape

import pytest

from runner.errors import StoreBusy, StoreError, StoreUnreachable
from runner.storage.access import Access
from runner.storage.api import ObjectInfo
from runner.storage.refusals import Asked
from runner.storage.s3 import S3Bucket
from runner.storage.s3.lister import page_of, query_for
from tests.servers import Server
from tests.servers.web import Reply, Seen, answering

ASKED = Asked("list", "s3://bucket")
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}

ODD_KEYS = [
    "../above",
    "a/../b",
    "./here",
    "a//b",
    "/absolute",
    "//",
    "folder/",
    "new\nline",
    "tab\tand\rreturn",
    " spaces  ",
    "plus+percent%20%2B",
    "a&amp;b<c>\"d'",
    "ünï/數據/🚀",
    "x" * 1024,
]


def listing(keys: list[str], *, more: str = "", root: str = "ListBucketResult", space: str = NAMESPACE) -> bytes:
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-30T19:33:40.250Z</LastModified>"
        f"<ETag>&quot;abc&quot;</ETag><Size>3</Size></Contents>"
        for key in keys
    )
    flag = "true" if more else "false"
    return f"<?xml version='1.0'?><{root}{space}><IsTruncated>{flag}</IsTruncated>{more}{entries}</{root}>".encode()


def bucket_at(url: str) -> S3Bucket:
    return S3Bucket("bucket", Access(endpoint=url, region="us-east-1", environ=KEYS))


def all_keys(bucket: S3Bucket, prefix: str = "") -> list[str]:
    found: list[str] = []
    token: str | None = None
    while True:
        page = bucket.page(prefix, token)
        found += [info.key for info in page.objects]
        token = page.next
        if token is None:
            return found


def test_odd_keys_are_listed_and_read_exactly(ministack: Server, fresh_bucket: Callable[[Server], str]) -> None:
    name = fresh_bucket(ministack)
    client = ministack.client()
    for number, key in enumerate(ODD_KEYS):
        client.put_object(Bucket=name, Key=key, Body=f"content {number}".encode())
    bucket = S3Bucket(name, ministack.access())
    assert sorted(all_keys(bucket)) == sorted(ODD_KEYS)
    for info in bucket.page("", None).objects:
        with bucket.get(info.key, version=info.version, start=8) as answer:
            assert b"".join(answer.chunks) == str(ODD_KEYS.index(info.key)).encode()
            assert (answer.size, answer.version) == (info.size, info.version)
    bucket.delete(ODD_KEYS)
    assert all_keys(bucket) == []


def test_an_entry_is_read_whole() -> None:
    page = page_of(ASKED, listing(["a b"]), "", None)
    assert page.objects == (ObjectInfo("a b", 3, "abc", 1796067220.25),)
    assert page.next is None


@pytest.mark.parametrize("space", [NAMESPACE, ""])
def test_keys_are_decoded_where_they_are_encoded(space: str) -> None:
    plain = page_of(ASKED, listing(["a+b%20c"], space=space), "", None)
    assert [info.key for info in plain.objects] == ["a+b%20c"]
    encoded = listing(["a+b%20c%2B"], space=space).replace(b"<IsTr", b"<EncodingType>url</EncodingType><IsTr")
    assert [info.key for info in page_of(ASKED, encoded, "", None).objects] == ["a b c+"]


def test_an_older_listing_goes_on_from_its_last_key() -> None:
    page = page_of(ASKED, listing(["a", "b"]).replace(b"false", b"true"), "", None)
    assert page.next is not None
    query = query_for("p/", page.next, delimiter=False, version=1, url_encoding=False)
    assert query == {"marker": "b", "max-keys": "1000", "prefix": "p/"}


def test_a_listing_that_is_cut_off_raises() -> None:
    body = listing(["a", "b"])
    for end in range(0, len(body), 7):
        with pytest.raises(StoreUnreachable, match="cut off"):
            page_of(ASKED, body[:end], "", None)


@pytest.mark.parametrize(
    "body",
    [
        listing([], root="ListAllMyBucketsResult"),
        b"<html><body>Welcome</body></html>",
        listing(["a"], more="<NextContinuationToken/>").replace(b"<Contents>", b"<!--").replace(b"</Contents>", b"-->"),
        listing(["a"]).replace(b"<Size>3</Size>", b""),
    ],
)
def test_what_is_no_listing_raises(body: bytes) -> None:
    with pytest.raises(StoreError) as caught:
        page_of(ASKED, body, "", None)
    assert not caught.value.retryable


def test_a_page_that_comes_again_raises() -> None:
    bodies = [listing(["a", "b"], more=f"<NextContinuationToken>{number}</NextContinuationToken>") for number in (1, 2)]
    first = page_of(ASKED, bodies[0], "", None)
    with pytest.raises(StoreError, match="does not advance"):
        page_of(ASKED, bodies[0], "", first.next)
    with pytest.raises(StoreError, match="does not advance"):
        page_of(ASKED, bodies[1], "", first.next)


def test_a_store_that_repeats_itself_ends_no_listing_early() -> None:
    more = "<NextContinuationToken>for ever</NextContinuationToken>"
    with answering(lambda _: Reply(body=listing(["a"], more=more))) as server:
        with pytest.raises(StoreError, match="does not advance"):
            all_keys(bucket_at(server.url))
        assert len(server.seen) == 2


def test_an_answer_that_is_cut_off_on_the_way_raises() -> None:
    body = listing(["a", "b"])
    with (
        answering(lambda _: Reply(body=body[:-60], length=len(body))) as server,
        pytest.raises(StoreUnreachable),
    ):
        bucket_at(server.url).page("", None)


def test_a_store_without_the_second_protocol_is_listed_with_the_first() -> None:
    def reply(request: Seen) -> Reply:
        if "list-type=2" in request.url:
            return Reply(501, b"<Error><Code>NotImplemented</Code></Error>")
        if "marker=b" in request.url:
            return Reply(body=listing(["c"]))
        return Reply(body=listing(["a", "b"], more="<NextMarker>b</NextMarker>"))

    with answering(reply) as server:
        bucket = bucket_at(server.url)
        assert all_keys(bucket) == ["a", "b", "c"]
        assert all_keys(bucket) == ["a", "b", "c"]
        assert sum("list-type=2" in request.url for request in server.seen) == 1


def test_other_refusals_are_not_mistaken_for_that() -> None:
    with answering(lambda _: Reply(503, b"<Error><Code>SlowDown</Code></Error>")) as server:
        with pytest.raises(StoreBusy):
            bucket_at(server.url).page("", None)
        assert len(server.seen) == 1
