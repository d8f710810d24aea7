"""How a store proves that what arrived is what was sent. Not all of them check what they are told of a body.

CRC32C costs a twentieth of MD5, which costs more than all else of an upload. So a store is put to the test once: it is
sent a part that does not match its checksum, in an upload that is then forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from crc32c import crc32c

from runner.errors import CloudrunError, ObjectMissing, StoreError, StoreUnreachable
from runner.storage.bucket import Buffer
from runner.storage.s3.answers import code_in, error_in, needed, tag_in
from runner.storage.s3.connection import Connection

UNSIGNED = "UNSIGNED-PAYLOAD"
"""What is signed of a body that a digest of its own proves."""

ALGORITHM = {"ChecksumAlgorithm": "CRC32C"}
"""What an upload says at its beginning when its parts bring a CRC32C."""

TEST_BODY = b"cloudrun"
_MISMATCH = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})
_UNKNOWN = frozenset({"InvalidRequest", "InvalidArgument", "NotImplemented", "NotSupported", "UnsupportedOperation"})
"""The header itself is refused."""


class Arrival(Enum):
    """What a store checks of a body, the cheapest first."""

    CRC32C = "crc32c"
    MD5 = "md5"
    TAG = "tag"
    """It checks nothing, but tells the MD5 of what it has."""
    NOTHING = "nothing"

    def sum(self, body: Buffer) -> int | None:
        """The CRC32C of ``body``, where the store checks it."""
        return crc32c(body) if self is Arrival.CRC32C else None

    def headers(self, body: Buffer, crc: int | None) -> dict[str, str]:
        """What to send along with ``body``, whose :meth:`sum` is ``crc``."""
        if crc is not None:
            return {"x-amz-checksum-crc32c": crc_text(crc)}
        return {"Content-MD5": md5_text(body)} if self is Arrival.MD5 else {}


def crc_text(checksum: int) -> str:
    """A CRC32C as S3 writes it."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def md5_of(body: Buffer) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()


def md5_text(body: Buffer) -> str:
    return base64.b64encode(md5_of(body)).decode()


class ArrivalTest:
    """Finds out, once, what the store of a bucket checks. Safe to use from many threads."""

    def __init__(self, connection: Connection, target: Mapping[str, Any], sealing: Mapping[str, Any]) -> None:
        """``target`` stands in every request, ``sealing`` says how to encrypt."""
        self._connection = connection
        self._target = target
        self._sealing = sealing
        self._lock = threading.Lock()
        self._found: Arrival | None = None

    def found(self, key: str) -> Arrival:
        """Asked with an upload to ``key``, where the caller may write. Raises the errors of a store that does not
        answer, or refuses to be written to.
        """
        with self._lock:
            if self._found is None:
                self._found = self._ask(key)
            return self._found

    def _ask(self, key: str) -> Arrival:
        wrong = b"\0" * len(TEST_BODY)
        if self._answer(key, {"x-amz-checksum-crc32c": crc_text(crc32c(wrong))}, ALGORITHM) is None:
            return Arrival.CRC32C
        tag = self._answer(key, {"Content-MD5": md5_text(wrong)}, {})
        if tag is None:
            return Arrival.MD5
        return Arrival.TAG if tag == md5_of(TEST_BODY).hex() else Arrival.NOTHING

    def _answer(self, key: str, headers: Mapping[str, str], algorithm: Mapping[str, str]) -> str | None:
        """The tag of a part that comes with these headers and does not match them; None when it is refused for that."""
        try:
            upload = self._begin(key, algorithm)
        except StoreError as error:
            if error.retryable or isinstance(error, ObjectMissing) or not algorithm:
                raise
            return ""  # the store has never heard of it
        try:
            return self._send(key, upload, headers)
        finally:
            # Best effort: what is left is one part of eight bytes, which the sweep of uploads removes.
            with suppress(CloudrunError), self._connection.asking("write", key):
                self._connection.client.abort_multipart_upload(**self._options_of(key), UploadId=upload)

    def _begin(self, key: str, algorithm: Mapping[str, str]) -> str:
        with self._connection.asking("write", key) as asked:
            begun = self._connection.client.create_multipart_upload(
                **self._options_of(key), **self._sealing, **algorithm
            )
            return str(needed(asked, begun, "UploadId"))

    def _send(self, key: str, upload: str, headers: Mapping[str, str]) -> str | None:
        query = {"partNumber": "1", "uploadId": upload}
        with self._connection.asking("write", key) as asked:
            answer = self._connection.wire.send(
                asked, "PUT", key=key, query=query, headers=headers, body=TEST_BODY, digest=UNSIGNED, refuse=False
            )
            if answer.status_code < 300:
                return tag_in(asked, answer.headers)
            code = code_in(answer.content)
            if answer.status_code == 400 and code in _MISMATCH:
                return None
            if code in _UNKNOWN:
                return ""
            if answer.status_code == 400 and not code:
                raise StoreUnreachable(f"{asked.what}: the store's answer to a test is cut off")
            raise error_in(asked, answer.status_code, answer.content)

    def _options_of(self, key: str) -> dict[str, Any]:
        return {**self._target, "Key": key}
