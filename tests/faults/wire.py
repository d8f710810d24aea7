"""HTTP/1.1 messages as they lie on the wire: read whole, and kept to the byte."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

HEAD_LIMIT = 1 << 20
AT_ONCE = 1 << 18
NO_BODY = frozenset({204, 304})


class HungUp(Exception):
    """The other side closed the connection in the middle of a message, or before one."""


@dataclass(frozen=True, slots=True)
class Message:
    """``head`` ends with the empty line; ``wire`` is the body as it came, ``body`` without the framing of chunks."""

    head: bytes
    wire: bytes
    body: bytes

    @property
    def raw(self) -> bytes:
        return self.head + self.wire

    @property
    def start(self) -> str:
        return self.head.partition(b"\r\n")[0].decode("latin-1")

    @property
    def status(self) -> int:
        return int(self.start.split()[1])

    @property
    def method(self) -> str:
        return self.start.partition(" ")[0]

    @property
    def target(self) -> str:
        return self.start.split(" ")[1]

    def header(self, name: str) -> str:
        """The value of the first header of that name; empty when there is none."""
        return header_of(self.head, name)

    @property
    def is_last(self) -> bool:
        """Whether its sender closes the connection after it."""
        return self.header("connection").lower() == "close"

    def with_body(self, body: bytes, *, length: int | None = None) -> Message:
        """The same head around another body. ``length`` is what Content-Length claims, if not the truth."""
        lines = [line for line in self.head.split(b"\r\n")[:-2] if not _frames(line)]
        lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
        return Message(b"\r\n".join(lines) + b"\r\n\r\n", body, body)


def _frames(line: bytes) -> bool:
    return line.partition(b":")[0].strip().lower() in (b"content-length", b"transfer-encoding")


def header_of(head: bytes, name: str) -> str:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name.lower().encode():
            return value.strip().decode("latin-1")
    return ""


class Reader:
    """Takes messages from a socket. Bytes beyond a message are kept for the next one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def head(self) -> bytes:
        """Up to and with the empty line. Raises HungUp when the other side closes before its end."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_LIMIT:
                raise HungUp("a head without an end")
            self._more()
        return self.take(end + 4)

    def request(self, head: bytes, limit: Callable[[int], int] | None = None) -> Message:
        """The request that begins with ``head``. ``limit(total)`` says how much of a body of known length to read."""
        if header_of(head, "transfer-encoding").lower() == "chunked":
            return Message(head, *self._chunked())
        length = int(header_of(head, "content-length") or 0)
        body = self.take(length if limit is None else min(length, limit(length)))
        return Message(head, body, body)

    def answer(self, method: str) -> Message:
        """The answer to a ``method`` request; interim ones (100) are skipped."""
        head = self.head()
        while head.split(b" ", 2)[1].startswith(b"1"):
            head = self.head()
        status = int(head.split(b" ", 2)[1])
        if method == "HEAD" or status in NO_BODY:
            return Message(head, b"", b"")
        if header_of(head, "transfer-encoding").lower() == "chunked":
            return Message(head, *self._chunked())
        length = header_of(head, "content-length")
        body = self.take(int(length)) if length else self._rest()
        return Message(head, body, body)

    def take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _more(self) -> None:
        data = self._sock.recv(AT_ONCE)
        if not data:
            raise HungUp("the connection ended")
        self._buffer += data

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            self._more()
        return self.take(end + 2)

    def _rest(self) -> bytes:
        try:
            while True:
                self._more()
        except HungUp:
            return self.take(len(self._buffer))

    def _chunked(self) -> tuple[bytes, bytes]:
        wire, body = bytearray(), bytearray()
        while True:
            line = self._line()
            size = int(line.split(b";")[0], 16)
            chunk = self.take(size) if size else b""
            wire += line + chunk
            body += chunk
            if not size:
                break
            wire += self._line()
        while (line := self._line()) != b"\r\n":
            wire += line
        return bytes(wire + b"\r\n"), bytes(body)
