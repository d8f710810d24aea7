"""An object's bytes on their way in: through obstore, or exactly as the key is called."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import obstore
from botocore.exceptions import ClientError
from obstore.exceptions import GenericError

from runner.errors import BadKey, ObjectChanged, StoreUnreachable
from runner.storage.api import ObjectInfo, check_key, check_size
from runner.storage.bucket import Answer, Proof, Whole
from runner.storage.s3.answers import needed, tag_in
from runner.storage.s3.connection import Connection

CHUNK = 256 * 1024
"""Bytes handed on at once."""

SMALL = 1024 * 1024
"""Bytes up to which an answer comes in one piece."""

_NO_RANGE = "Received non-partial response when range requested"
_MD5 = re.compile(r"[0-9a-f]{32}")


def is_odd(key: str) -> bool:
    """Whether obstore would mistake the key for another one, or refuse it."""
    try:
        check_key(key)
    except BadKey:
        return True
    return False


def is_md5(version: str) -> bool:
    """Whether an ETag looks like the digest of a body."""
    return _MD5.fullmatch(version) is not None


def head(connection: Connection, target: Mapping[str, Any], key: str) -> ObjectInfo:
    found, asked = heading(connection, target, key), connection.asked("read", key)
    with connection.asking("read", key):
        modified = needed(asked, found, "LastModified").timestamp()
        return ObjectInfo(key, needed(asked, found, "ContentLength"), tag_in(asked, found), modified)


def heading(connection: Connection, target: Mapping[str, Any], key: str) -> Any:
    """The headers of an object. The refusal of a HEAD has no body to say why: a GET is asked for the reason."""
    asked = connection.asked("read", key)
    with connection.asking("read", key):
        try:
            return connection.client.head_object(**target, Key=key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (400, 403, 404):
                raise
            connection.wire.send(asked, "GET", key=key, headers={"Range": "bytes=0-0"})
            raise StoreUnreachable(
                f"{asked.what}: a request was refused, and the same a moment later was not"
            ) from error


class Reader:
    """Gets objects of one bucket.

    Errors of the store are translated where they come up, and nowhere else: what goes wrong in the block of a caller
    who reads is no error of the store.
    """

    def __init__(self, connection: Connection, target: Mapping[str, Any], sse: str | None) -> None:
        self._connection = connection
        self._target = target
        self._tags_are_digests = False if sse and sse.startswith("aws:kms") else None
        self._ranges_exactly = False
        self._lock = threading.Lock()

    @contextmanager
    def get(self, key: str, version: str | None, start: int, length: int | None) -> Iterator[Answer]:
        answer = None if is_odd(key) else self._get(key, version, start, length)
        if answer is not None:
            yield answer
            return
        with self._connection.asking("read", key):
            body = self._send(key, version, start, length)
        with closing(body.raw):
            yield self._exact_answer(key, body, version, start, length)

    def read(self, key: str, at_most: int | None) -> Whole:
        """Without what a stream costs: small objects come by the thousand."""
        if is_odd(key):
            with self.get(key, None, 0, None) as answer:
                check_size(key, answer.size, at_most)
                return Whole(b"".join(answer.chunks), answer.version, answer.proof)
        with self._connection.asking("read", key) as asked:
            result = obstore.get(self._connection.objects, key)
            meta = result.meta
            check_size(key, meta["size"], at_most)
            data = bytes(result.bytes())
        if len(data) != meta["size"]:
            raise StoreUnreachable(f"{asked.what}: {len(data)} of {meta['size']} bytes came")
        version = tag_in(asked, meta, "e_tag")
        return Whole(data, version, self._proof(key, version))

    def _get(self, key: str, version: str | None, start: int, length: int | None) -> Answer | None:
        """Through obstore; None where the store's way with ranges is not obstore's."""
        ranged = start > 0 or length is not None
        if ranged and self._ranges_exactly:
            return None
        with self._connection.asking("read", key):
            try:
                result = obstore.get(self._connection.objects, key, options=_options(version, start, length))
            except GenericError as error:
                if not ranged or _NO_RANGE not in str(error):
                    raise
                self._ranges_exactly = True
                return None
            return self._answer(key, result, version, start, length)

    def proof(self, key: str, version: str) -> Proof | None:
        """The digest that the store keeps of the whole object, asked for with all that the store knows of it: an ETag
        may look like an MD5 and be none, where a KMS key or the customer's own encrypts.
        """
        head = heading(self._connection, self._target, key)
        return _proof(version, head.get("ServerSideEncryption"), head.get("SSECustomerAlgorithm"))

    def _answer(self, key: str, result: Any, version: str | None, start: int, length: int | None) -> Answer:
        size, found = result.meta["size"], tag_in(self._connection.asked("read", key), result.meta, "e_tag")
        _check_version(self._connection, key, found, version)
        expected = _expected(size, start, length)
        chunks = self._counted(key, _chunks(result, expected), expected)
        return Answer(size, found, chunks, self._proof(key, found))

    def _proof(self, key: str, version: str) -> Proof | None:
        """No header comes through obstore, so the first object of a bucket tells whether its tags are digests."""
        if not is_md5(version):
            return None
        with self._lock:
            if self._tags_are_digests is None:
                self._tags_are_digests = self.proof(key, version) is not None
        return Proof("md5", version) if self._tags_are_digests else None

    def _send(self, key: str, version: str | None, start: int, length: int | None) -> Any:
        headers = {"If-Match": f'"{version}"'} if version is not None else {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-" + ("" if length is None else str(start + length - 1))
        asked = self._connection.asked("read", key)
        return self._connection.wire.send(asked, "GET", key=key, headers=headers, stream=True)

    def _exact_answer(self, key: str, body: Any, version: str | None, start: int, length: int | None) -> Answer:
        headers = body.headers
        here = int(headers["Content-Length"])
        # Some stores call a part 200, some send all where a part was asked for.
        is_part = "Content-Range" in headers
        if body.status_code == 206:
            # Then it was no store that obstore does not understand, but somebody who answered once in its place.
            self._ranges_exactly = False
        size = int(headers["Content-Range"].rpartition("/")[2]) if is_part else here
        found = tag_in(self._connection.asked("read", key), headers)
        _check_version(self._connection, key, found, version)
        expected = _expected(size, start, length)
        stream = self._connection.wire.pieces(body, here)
        pieces = map(_view, stream) if is_part else _between(stream, start, expected)
        encryption = headers.get("x-amz-server-side-encryption")
        proof = _proof(found, encryption, headers.get("x-amz-server-side-encryption-customer-algorithm"))
        return Answer(size, found, self._counted(key, pieces, expected), proof)

    def _counted(self, key: str, chunks: Iterator[memoryview], expected: int) -> Iterator[memoryview]:
        """The chunks; StoreUnreachable unless they are as many bytes as they should be."""
        came = 0
        with self._connection.asking("read", key):
            for chunk in chunks:
                came += len(chunk)
                yield chunk
        if came != expected:
            raise StoreUnreachable(
                f"{self._connection.asked('read', key).what}: {came} bytes came instead of {expected}",
                "the connection was cut; try again later",
            )


def _options(version: str | None, start: int, length: int | None) -> Any:
    options: dict[str, Any] = {} if version is None else {"if_match": f'"{version}"'}
    if length is not None:
        options["range"] = (start, start + length)
    elif start:
        options["range"] = {"offset": start}
    return options


def _expected(size: int, start: int, length: int | None) -> int:
    left = max(0, size - start)
    return left if length is None else min(left, length)


def _chunks(result: Any, expected: int) -> Iterator[memoryview]:
    if expected <= SMALL:
        yield memoryview(result.bytes())
    else:
        yield from map(_view, result.stream(min_chunk_size=CHUNK))


def _view(chunk: Any) -> memoryview:
    return memoryview(chunk)


def _between(chunks: Iterator[bytes], start: int, length: int) -> Iterator[memoryview]:
    """What a store sends that knows no ranges, cut to the range."""
    at = 0
    for chunk in chunks:
        piece = memoryview(chunk)[max(0, start - at) : max(0, start + length - at)]
        at += len(chunk)
        if piece:
            yield piece


def _check_version(connection: Connection, key: str, found: str, wanted: str | None) -> None:
    """For stores that ignore conditions."""
    if wanted is not None and found != wanted:
        raise ObjectChanged(f"{connection.asked('read', key).what} is not the version that was asked for")


def _proof(version: str, encryption: str | None, customer: str | None) -> Proof | None:
    by_key = (encryption or "").startswith("aws:kms") or customer
    return Proof("md5", version) if is_md5(version) and not by_key else None
