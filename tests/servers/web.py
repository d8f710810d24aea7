"""Small HTTP servers in this process: one that answers as told, and a proxy that notes what passes."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Seen:
    """A request as it came over the wire; the names of headers are in lower case."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    """What Content-Length says, where that is not the truth: the connection is closed then."""


@dataclass(frozen=True)
class Web:
    url: str
    seen: list[Seen]


@contextmanager
def answering(reply: Callable[[Seen], Reply]) -> Iterator[Web]:
    """A server of 127.0.0.1 that answers each request with what ``reply`` returns."""
    seen: list[Seen] = []

    class Handler(_Handler):
        def answer(self, request: Seen) -> None:
            seen.append(request)
            self.send(reply(request))

    with _serving(Handler) as url:
        yield Web(url, seen)


@contextmanager
def proxy() -> Iterator[Web]:
    """A forward proxy for ``http://``, which notes what it forwards."""
    seen: list[Seen] = []

    class Handler(_Handler):
        def answer(self, request: Seen) -> None:
            seen.append(request)
            self.send(_forward(request))

    with _serving(Handler) as url:
        yield Web(url, seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, request: Seen) -> None:
        raise NotImplementedError

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.answer(Seen(self.command, self.path, headers, body))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815  # the names that http.server calls

    def send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name in reply.headers}:
            self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else reply.body)
        self.close_connection = reply.length is not None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
        """Say nothing."""


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_HOP = ("connection", "proxy-connection", "keep-alive", "transfer-encoding", "expect")


def _forward(request: Seen) -> Reply:
    parts = urlsplit(request.url)
    # As it came: a proxy that rewrites a URL breaks its signature.
    target = request.url.partition("://")[2].partition("/")[2]
    upstream = http.client.HTTPConnection(parts.netloc, timeout=30)
    try:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        upstream.request(request.method, f"/{target}", request.body or None, headers)
        answer = upstream.getresponse()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        body = answer.read()
        return Reply(answer.status, body, kept)
    finally:
        upstream.close()
