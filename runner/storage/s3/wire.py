"""Signed requests through a pool of kept-alive connections: for what obstore cannot say, or not exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse, HeadersDict
from botocore.httpsession import URLLib3Session
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from runner.errors import StoreUnreachable
from runner.storage.bucket import Buffer
from runner.storage.refusals import Asked
from runner.storage.s3.answers import error_in
from runner.storage.s3.settings import Login

PIECE = 256 * 1024

_NOTHING = hashlib.sha256(b"").hexdigest()


def pool_of(
    certificates: str | None, proxies: Mapping[str, str], timeout: tuple[float, float], connections: int
) -> URLLib3Session:
    """Connections that are kept. ``timeout`` is seconds to connect, and seconds without a byte."""
    return URLLib3Session(
        verify=certificates or True, proxies=dict(proxies), timeout=timeout, max_pool_connections=connections
    )


class Wire:
    """Requests to one bucket, whose URL is ``base``. Any key goes out exactly as it is called."""

    def __init__(self, base: str, region: str, login: Login, pool: URLLib3Session, headers: Mapping[str, str]) -> None:
        self._base = base
        self._region = region
        self._login = login
        self._pool = pool
        self._headers = headers

    def send(
        self,
        asked: Asked,
        method: str,
        *,
        key: str = "",
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer | None = None,
        digest: str | None = None,
        stream: bool = False,
        refuse: bool = True,
    ) -> Any:
        """The answer (a botocore AWSResponse), read already unless it is to ``stream``. Raises botocore's
        errors where none came and, unless the caller wants to see for itself (``refuse``), ours for refusals.

        ``digest`` is what is signed of the body: its SHA-256 unless the caller proves it otherwise.
        """
        request = AWSRequest(method, self._url(key, query), headers={**self._headers, **(headers or {})})
        signs = digest or (_NOTHING if body is None else hashlib.sha256(body).hexdigest())
        _Signer(self._login.get_frozen_credentials(), self._region, signs).add_auth(request)
        signed = HeadersDict(request.headers.items())
        pieces = None if body is None else _Pieces(body)
        if pieces is not None:
            signed["Content-Length"] = str(len(pieces))
        answer = self._pool.send(AWSPreparedRequest(method, request.url, signed, pieces, stream_output=stream))
        if refuse and answer.status_code >= 300:
            raise error_in(asked, answer.status_code, _body_of(asked, answer))
        return answer

    def pieces(self, answer: Any, size: int) -> Iterator[bytes]:
        """The body of an answer that streams, of ``size`` bytes. Raises botocore's errors where it is cut off."""
        pieces: Iterator[bytes] = StreamingBody(answer.raw, size).iter_chunks(PIECE)
        return pieces

    def _url(self, key: str, query: Mapping[str, str] | None) -> str:
        path = f"{self._base}/{quote(key, safe='/~')}" if key else f"{self._base}/"
        return f"{path}?{urlencode(query, quote_via=quote, safe='')}" if query else path


def _body_of(asked: Asked, answer: AWSResponse) -> bytes:
    try:
        return bytes(answer.content)
    except HTTPError as error:
        raise StoreUnreachable(f"{asked.what}: the answer was cut off") from error


class _Pieces:
    """A body that is handed on piece by piece: a time-out is for a piece, and not for all of it on a slow line."""

    def __init__(self, body: Buffer) -> None:
        self._body = memoryview(body)

    def __len__(self) -> int:
        return len(self._body)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._body), PIECE):
            yield self._body[start : start + PIECE]


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Version 4, with the digest of a body that is never copied."""

    def __init__(self, credentials: Any, region: str, digest: str) -> None:
        super().__init__(credentials, "s3", region)
        self._digest = digest

    def payload(self, _request: AWSRequest) -> str:
        return self._digest
