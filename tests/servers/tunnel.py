"""A proxy for ``https://``: it opens tunnels (``CONNECT``) and sees nothing of what flows through them."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import parse_headers
from io import BytesIO

LONGEST = 30.0
"""Seconds without a byte after which a tunnel is given up."""


@dataclass(frozen=True)
class Asked:
    """A request as it came to the proxy; the names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Tunnels:
    """A running proxy. ``names`` are hosts that it alone knows; ``login`` is ``user:password`` where it wants one."""

    port: int
    names: Mapping[str, int]
    login: str | None = None
    seen: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.login + '@' if self.login else ''}127.0.0.1:{self.port}"

    def admits(self, asked: Asked) -> bool:
        told = asked.headers.get("proxy-authorization", "")
        return self.login is None or told == f"Basic {base64.b64encode(self.login.encode()).decode()}"


@contextmanager
def tunnelling(names: Mapping[str, int] | None = None, login: str | None = None) -> Iterator[Tunnels]:
    """A proxy of 127.0.0.1. Each of the ``names`` leads to that port of 127.0.0.1; other hosts are refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Tunnels(listener.getsockname()[1], names or {}, login)
        accepting = threading.Thread(target=_accept, args=(listener, proxy))
        accepting.start()
        try:
            yield proxy
        finally:
            # Wakes the one that waits in accept.
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listener: socket.socket, proxy: Tunnels) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(client, proxy), daemon=True).start()


def _serve(client: socket.socket, proxy: Tunnels) -> None:
    with client, suppress(OSError):
        client.settimeout(LONGEST)
        head, beyond = _read_head(client)
        line, _, rest = head.partition(b"\r\n")
        method, target, _ = line.decode().split(" ")
        headers = {name.lower(): value for name, value in parse_headers(BytesIO(rest)).items()}
        asked = Asked(method, target, headers)
        proxy.seen.append(asked)
        port = proxy.names.get(target.partition(":")[0])
        if not proxy.admits(asked):
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        elif method != "CONNECT" or port is None:
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        else:
            _tunnel(client, port, beyond)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The request up to its empty line, and what came after it already."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        if not piece:
            raise ConnectionResetError
        data += piece
    head, end, beyond = data.partition(b"\r\n\r\n")
    return head + end, beyond


def _tunnel(client: socket.socket, port: int, beyond: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=LONGEST) as server:
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        server.sendall(beyond)
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
