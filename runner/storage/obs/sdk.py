"""Huawei's SDK, set up so that it can be relied on. Import it late: it is slow, and may not be installed."""

from __future__ import annotations

import http.client
import queue
import select
import ssl
from typing import Any

from obs import CompletePart, ObsClient

from runner.storage.obs.endpoint import Endpoint

__all__ = ["CompletePart", "make_client"]

CHUNK = 256 << 10
"""Bytes that go to the socket at a time."""

_VERBATIM = (
    "parseListObjects",
    "parseListMultipartUploads",
    "parseListParts",
    "parseCompleteMultipartUpload",
    "parseCopyObject",
    "parseCopyPart",
    "parseDeleteObjects",
)


class Connections(queue.LifoQueue[http.client.HTTPConnection]):
    """Idle connections, the warmest first. One that the server has closed meanwhile is not handed out again: the
    request would fail for no reason.
    """

    def get_nowait(self) -> http.client.HTTPConnection:
        while True:
            connection = super().get_nowait()
            if _is_quiet(connection):
                return connection
            connection.close()


def _is_quiet(connection: http.client.HTTPConnection) -> bool:
    """False when something has come in, which can only be the end: nothing was asked."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def make_client(endpoint: Endpoint, timeout: float) -> Any:
    """A client without keys: ``refresh`` gives it some. Safe to use from many threads.

    It tries each request once, and answers errors of the server as values. Answers in XML come back as text, for the
    SDK swallows what it cannot read, and moves times by an hour where there is summer time.
    """
    proxy = endpoint.proxy
    client = ObsClient(
        server=endpoint.url,
        # With an address, or in path style, it would take v2 without saying so.
        signature="obs" if endpoint.virtual else "v2",
        path_style=not endpoint.virtual,
        ssl_verify=True,
        # It cannot use a connection through a proxy twice.
        long_conn_mode=proxy is None,
        is_signature_negotiation=False,
        max_retry_count=0,
        timeout=timeout,
        chunk_size=CHUNK,
        proxy_host=proxy.host if proxy else None,
        proxy_port=proxy.port if proxy else None,
        proxy_username=proxy.user if proxy else None,
        proxy_password=proxy.password if proxy else None,
    )
    if client.is_secure:
        # Its own context knows no authority, so that every certificate is refused, and compares no host names.
        client.context = ssl.create_default_context()
    if client.connHolder is not None:
        client.connHolder["connSet"] = Connections()
    for method in _VERBATIM:
        setattr(client.convertor, method, _verbatim)
    return client


class _Text(str):  # noqa: SLOT000 - the SDK puts an attribute on some answers
    """An answer as it came."""


def _verbatim(answer: Any, _headers: Any = None) -> str:
    """Takes the place of the SDK's parsers, which get the headers instead when there is no body."""
    return _Text(answer if isinstance(answer, str) else "")
