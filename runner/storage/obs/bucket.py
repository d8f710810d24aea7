"""A bucket of OBS, request by request."""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from types import ModuleType
from typing import Any

from runner.errors import (
    AccessDenied,
    BadKey,
    CloudrunError,
    CredentialsExpired,
    ObjectChanged,
    ObjectMissing,
    StoreError,
    StoreUnreachable,
)
from runner.storage.access import Access
from runner.storage.api import ObjectInfo, check_size
from runner.storage.bucket import Answer, Buffer, Page, Part, Proof, Unfinished, Whole
from runner.storage.obs.credentials import Credentials, Keys
from runner.storage.obs.endpoint import Endpoint, endpoint_of
from runner.storage.obs.replies import (
    etag_in,
    is_exact,
    page_in,
    parts_in,
    refusals_in,
    uploads_in,
    version_of,
)
from runner.storage.refusals import EXPIRED, UNKNOWN_WHO, Asked, error_of

TIMEOUT = 30.0
"""Seconds without a byte."""

PAGE = 1000
CHUNK = 256 << 10
"""Bytes that are handed on at a time."""

COPY_AT_ONCE = 5 << 30
"""Bytes that one request may copy."""

_MD5 = re.compile(r"[0-9a-f]{32}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class ObsBucket:
    """A :class:`runner.storage.bucket.Bucket` through Huawei's SDK."""

    def __init__(
        self,
        name: str,
        access: Access,
        *,
        credentials: Credentials | None = None,
        timeout: float = TIMEOUT,
        copy_at_once: int = COPY_AT_ONCE,
    ) -> None:
        self._sdk = _sdk()
        self._name = name
        self._endpoint: Endpoint = endpoint_of(name, access)
        self._credentials = credentials or Credentials(access.environ)
        self._client = self._sdk.make_client(self._endpoint, timeout)
        self._keys: Keys | None = None
        self._copy_at_once = copy_at_once
        self._always = {self._client.ha.request_payer_header(): "requester"} if access.requester_pays else {}
        self._sealed = self._encryption(access)

    @property
    def url(self) -> str:
        return f"obs://{self._name}"

    # Reading

    def page(self, prefix: str, token: str | None, *, delimiter: bool = False) -> Page:
        asked = Asked("list", self.url, prefix)
        text = self._list(asked, token, "/" if delimiter else None, None)
        if not is_exact(text):
            # Not asked for at once: parallel file systems answer the same page for ever.
            text = self._list(asked, token, "/" if delimiter else None, "url")
        return page_in(asked, text, token)

    def _list(self, asked: Asked, token: str | None, delimiter: str | None, encoding: str | None) -> str:
        answer = self._request(
            asked,
            "listObjects",
            prefix=asked.key,
            marker=token,
            max_keys=PAGE,
            delimiter=delimiter,
            encoding_type=encoding,
        )
        return str(answer.body)

    @contextmanager
    def get(
        self, key: str, *, version: str | None = None, start: int = 0, length: int | None = None
    ) -> Iterator[Answer]:
        asked = Asked("read", self.url, key)
        span = None if start == 0 and length is None else (start, None if length is None else start + length)
        answer = self._request(asked, "getObject", key, extra=_wanted(version, span))
        stream = answer.body.response
        try:
            yield self._answer(asked, answer, version, span)
        finally:
            _release(stream)

    def read(self, key: str, at_most: int | None = None) -> Whole:
        with self.get(key) as answer:
            check_size(key, answer.size, at_most)
            return Whole(b"".join(answer.chunks), answer.version, answer.proof)

    def _answer(self, asked: Asked, answer: Any, version: str | None, span: tuple[int, int | None] | None) -> Answer:
        etag = self._version(asked, answer)
        if version is not None and etag != version:
            raise ObjectChanged(f"{asked.what} is not the version that was asked for")
        coming = answer.body.contentLength
        if coming is None:
            raise StoreUnreachable(f"{asked.what}: the answer does not tell how many bytes come")
        size = coming if span is None else _size_told(asked, answer, span, coming)
        return Answer(size, etag, _chunks(asked, answer.body.response, coming), _proof(etag, answer.body))

    def proof(self, key: str, version: str) -> Proof | None:
        asked = Asked("read", self.url, key)
        answer = self._request(asked, "getObjectMetadata", key)
        etag = self._version(asked, answer)
        return _proof(etag, answer.body) if etag == version else None

    def head(self, key: str) -> ObjectInfo:
        asked = Asked("read", self.url, key)
        answer = self._request(asked, "getObjectMetadata", key)
        body = answer.body
        if body is None or body.contentLength is None:
            raise StoreUnreachable(f"{asked.what}: the answer tells no size")
        return ObjectInfo(key, body.contentLength, self._version(asked, answer), _seconds(body.lastModified))

    # Writing

    def put(self, key: str, data: Buffer, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        asked = Asked("write", self.url, key)
        # The SDK's own fields for conditions never leave the house: only extra headers do.
        condition = {"If-None-Match": "*"} if only_new else {"If-Match": replacing} if replacing is not None else {}
        outgoing = _Outgoing(data)
        answer = self._request(
            asked,
            "putContent",
            key,
            outgoing,
            headers={"contentLength": outgoing.size, "md5": outgoing.md5},
            extra={**condition, **self._sealed},
        )
        return self._written(asked, answer, self._version(asked, answer), outgoing.size)

    def begin(self, key: str) -> str:
        asked = Asked("write", self.url, key)
        answer = self._request(asked, "initiateMultipartUpload", key, extra=self._sealed)
        upload = answer.body.uploadId if answer.body is not None else None
        if not upload:
            raise StoreUnreachable(f"{asked.what}: the answer tells no upload's id")
        return str(upload)

    def put_part(self, key: str, upload: str, number: int, data: Buffer) -> Part:
        asked = Asked("write", self.url, key)
        outgoing = _Outgoing(data)
        answer = self._request(
            asked,
            "uploadPart",
            key,
            number,
            upload,
            content=outgoing,
            partSize=outgoing.size,
            md5=outgoing.md5,
        )
        return Part(number, outgoing.size, self._version(asked, answer))

    def parts(self, key: str, upload: str) -> list[Part]:
        asked = Asked("write", self.url, key)
        found: list[Part] = []
        after: int | None = 0
        while after is not None:
            answer = self._request(asked, "listParts", key, upload, maxParts=PAGE, partNumberMarker=after)
            some = parts_in(asked, answer.body, after)
            found += some.parts
            after = some.next
        return found

    def finish(self, key: str, upload: str, parts: Sequence[Part]) -> ObjectInfo:
        asked = Asked("write", self.url, key)
        listed = [self._sdk.CompletePart(partNum=part.number, etag=part.tag) for part in parts]
        answer = self._request(asked, "completeMultipartUpload", key, upload, {"parts": listed})
        return self._written(
            asked,
            answer,
            etag_in(asked, answer.body, "CompleteMultipartUploadResult"),
            sum(part.size for part in parts),
        )

    def abort(self, key: str, upload: str) -> None:
        try:
            self._request(Asked("delete", self.url, key), "abortMultipartUpload", key, upload)
        except ObjectMissing:
            return

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        asked = Asked("list", self.url, prefix)
        after: tuple[str, str] | None = None
        while True:
            key, upload = after or (None, None)
            wanted = {"prefix": prefix, "key_marker": key, "upload_id_marker": upload, "max_uploads": PAGE}
            some = uploads_in(asked, self._request(asked, "listMultipartUploads", wanted).body, after)
            yield from (one for one in some.uploads if one.key.startswith(prefix))
            if some.next is None:
                return
            after = some.next

    # Copying and deleting

    def copy(self, source: str, key: str, *, version: str | None, size: int) -> ObjectInfo:
        if "?versionId=" in source:
            raise BadKey(f"bad key {source!r}: the OBS SDK cannot copy from a key with ?versionId= in it")
        if size > self._copy_at_once:
            return self._copy_in_parts(source, key, version, size)
        asked = Asked("write", self.url, source)
        answer = self._request(
            asked,
            "copyObject",
            source,
            self._name,
            key,
            extra={**self._same_source(version), **self._sealed},
        )
        return self._written(
            Asked("write", self.url, key), answer, etag_in(asked, answer.body, "CopyObjectResult"), size
        )

    def _copy_in_parts(self, source: str, key: str, version: str | None, size: int) -> ObjectInfo:
        wanted = version or self.head(source).version
        upload = self.begin(key)
        try:
            starts = range(0, size, self._copy_at_once)
            parts = [
                self._copy_part(source, key, upload, number, wanted, (start, min(start + self._copy_at_once, size)))
                for number, start in enumerate(starts, 1)
            ]
            # OBS does not say that it looks at conditions when it copies parts.
            if self.head(source).version != wanted:
                raise ObjectChanged(f"{self.url}/{source} is not the version that was asked for")
            return self.finish(key, upload, parts)
        except CloudrunError:
            with suppress(CloudrunError):  # swept later; what brought us here is the news
                self.abort(key, upload)
            raise

    def _copy_part(self, source: str, key: str, upload: str, number: int, version: str, span: tuple[int, int]) -> Part:
        asked = Asked("write", self.url, source)
        answer = self._request(
            asked,
            "copyPart",
            key,
            number,
            upload,
            f"/{self._name}/{source}",
            copySourceRange=f"bytes={span[0]}-{span[1] - 1}",
            extra=self._same_source(version),
        )
        return Part(number, span[1] - span[0], etag_in(asked, answer.body, "CopyPartResult"))

    def _same_source(self, version: str | None) -> dict[str, str]:
        return {self._client.ha.copy_source_if_match_header(): version} if version is not None else {}

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        doomed = {"quiet": True, "objects": [{"key": key} for key in keys]}
        asked = Asked("delete", self.url)
        answer = self._request(asked, "deleteObjects", doomed)
        for key, code, message in refusals_in(asked, answer.body):
            status = 403 if code.startswith("Access") else 400
            raise error_of(Asked("delete", self.url, key), status, code, message)

    # One request

    def _request(self, asked: Asked, method: str, *args: Any, extra: Mapping[str, str] = {}, **options: Any) -> Any:
        """The SDK's answer to one request, when it is success."""
        keys = self._credentials.keys()
        if keys is not self._keys:
            self._client.refresh(keys.access, keys.secret, keys.token)
            self._keys = keys
        with _ours(asked):
            answer = getattr(self._client, method)(
                self._name, *args, extensionHeaders={**self._always, **extra}, **options
            )
        if answer.status >= http.client.MULTIPLE_CHOICES:
            raise self._refusal(asked, answer, keys)
        return answer

    def _refusal(self, asked: Asked, answer: Any, keys: Keys) -> CloudrunError:
        code = answer.errorCode or dict(answer.header).get("error-code") or ""
        error = error_of(asked, answer.status, code, answer.errorMessage or "")
        if isinstance(error, AccessDenied) and code in EXPIRED | UNKNOWN_WHO and self._credentials.renewed(keys):
            return CredentialsExpired(error.message, error.hint)
        return error

    def _written(self, asked: Asked, answer: Any, version: str, size: int) -> ObjectInfo:
        return ObjectInfo(asked.key, size, version, _seconds(dict(answer.header).get("date")))

    @staticmethod
    def _version(asked: Asked, answer: Any) -> str:
        # From the header: an answer with a body where none should be has no parsed one.
        etag = dict(answer.header).get("etag")
        if not etag:
            raise StoreUnreachable(f"{asked.what}: the answer tells no ETag")
        return version_of(etag)

    def _encryption(self, access: Access) -> dict[str, str]:
        names = self._client.ha
        if access.sse is None:
            return {}
        if access.sse != "aws:kms":
            return {names.sse_kms_header(): access.sse}
        kind = {names.sse_kms_header(): "kms" if self._endpoint.virtual else access.sse}
        return kind | ({names.sse_kms_key_header(): access.kms_key} if access.kms_key else {})


class _Outgoing:
    """Bytes for the SDK, read without a copy: of plain bytes it would make a text, for a log that is off."""

    def __init__(self, data: Buffer) -> None:
        self._left = memoryview(data).cast("B")
        self.size = len(self._left)
        self.md5 = base64.b64encode(hashlib.md5(self._left, usedforsecurity=False).digest()).decode()

    def read(self, count: int) -> memoryview:
        some, self._left = self._left[:count], self._left[count:]
        return some


@contextmanager
def _ours(asked: Asked) -> Iterator[None]:
    """Turns whatever the SDK raises into an error of ours: sockets' errors come raw, much else as plain Exception."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise StoreError(
            f"{asked.bucket}: the endpoint's certificate is not to be trusted: {error.verify_message}",
            "check the endpoint, and the certificates that this machine trusts",
        ) from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise StoreUnreachable(
            f"{asked.what}: {error or type(error).__name__}", "check the endpoint and the network"
        ) from error
    except Exception as error:
        raise StoreError(f"{asked.what}: the OBS SDK failed: {type(error).__name__}: {error}") from error


def _sdk() -> ModuleType:
    try:
        from runner.storage.obs import sdk  # noqa: PLC0415 - slow, and an extra
    except ModuleNotFoundError as error:
        if error.name != "obs":
            raise
        raise StoreError("obs:// needs Huawei's SDK, which is not installed", "pip install 'cloudrun[obs]'") from None
    return sdk


def _wanted(version: str | None, span: tuple[int, int | None] | None) -> dict[str, str]:
    """Headers of a GET. The SDK encodes quotes, so that versions go without."""
    wanted = {"If-Match": version} if version is not None else {}
    if span is not None:
        start, end = span
        wanted["Range"] = f"bytes={start}-" if end is None else f"bytes={start}-{end - 1}"
    return wanted


def _size_told(asked: Asked, answer: Any, span: tuple[int, int | None], coming: int) -> int:
    """The size of the whole object. Raises unless exactly the range that was asked for comes."""
    told = _RANGE.fullmatch(dict(answer.header).get("content-range") or "")
    if answer.status != http.client.PARTIAL_CONTENT or told is None:
        raise StoreError(f"{asked.what}: the store does not answer ranges")
    first, last, size = (int(number) for number in told.groups())
    start, end = span
    expected = size if end is None else min(end, size)
    if (first, last + 1) != (start, expected) or coming != expected - start:
        raise StoreUnreachable(f"{asked.what}: the store answers another range than was asked for")
    return size


def _proof(etag: str, told: Any) -> Proof | None:
    """The ETag of what is encrypted, or was sent in parts, is no digest."""
    return Proof("md5", etag) if _MD5.fullmatch(etag) and not (told.sseKms or told.sseC) else None


def _chunks(asked: Asked, stream: Any, coming: int) -> Iterator[memoryview]:
    # Past the SDK's wrapper, which counts only until the connection ends and then raises a plain Exception.
    read: Callable[[int], bytes] = stream.result.read
    left = coming
    while left:
        with _ours(asked):
            chunk = read(min(CHUNK, left))
        if not chunk:
            raise StoreUnreachable(f"{asked.what}: the answer broke off {left} bytes before its end")
        left -= len(chunk)
        yield memoryview(chunk)


def _release(stream: Any) -> None:
    """Back to the idle connections; one with bytes of ours still on the way would mix up the next request."""
    if stream.result.isclosed() or stream.result.length == 0:
        stream.result.close()
        stream.close()
    else:
        stream.conn.close()


def _seconds(date: str | None) -> float:
    """Epoch seconds of a header's date: the store's clock, or ours where it tells none."""
    return parsedate_to_datetime(date).timestamp() if date else float(int(time.time()))
