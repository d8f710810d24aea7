"""A proxy in front of a real object server that spoils requests by a plan, and counts what it did.

    with spoiling(server.endpoint, plan) as proxy:
        ...  # a client whose endpoint is proxy.endpoint

Host and all other headers pass as the client sent them: a server that checks signatures by the Host header, as
SeaweedFS does, accepts them. Messages are read whole before they are passed on, so that a fault hits at an exact byte.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

from tests.faults.plans import (
    BODIES,
    RUBBISH,
    SAID_INSTEAD,
    SPOILT_REQUESTS,
    Fault,
    Kind,
    Plan,
    Request,
    nothing,
    request_of,
)
from tests.faults.wire import HungUp, Message, Reader

LONGEST_STALL = 60.0
"""Seconds after which a stalled connection is cut: a client that is still there has no patience to lose."""

UPSTREAM_PATIENCE = 60.0
POLL = 0.05
DRAIN = 0.5
"""Seconds for which a closed connection takes what the client still sends, lest the kernel make a RST of the FIN."""

PORTAL_PAGE = b"<html><head><title>Welcome</title></head><body>Please sign in to use this network.</body></html>"
NOT_HTTP = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n"


class _Close(Exception):
    """Ends a connection; with ``reset`` by a RST."""

    def __init__(self, *, reset: bool = False) -> None:
        self.reset = reset


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: what was asked, what was done to it (None: nothing), the server's status (0: it never saw it)."""

    request: Request
    fault: Fault | None
    status: int


class Proxy:
    """See the module. ``plan`` may be exchanged at any time. ``delay`` is how late a delayed answer is, in seconds."""

    def __init__(self, upstream: str, plan: Plan = nothing, *, delay: float = 0.1) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.plan = plan
        self.delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._seen: list[Seen] = []
        self.broken: list[Exception] = []
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._acceptor.start()

    @property
    def seen(self) -> list[Seen]:
        """Every request so far, in the order in which they ended."""
        with self._lock:
            return list(self._seen)

    @property
    def done(self) -> Counter[Kind]:
        """How many faults of each kind were carried out."""
        return Counter(seen.fault.kind for seen in self.seen if seen.fault is not None)

    def close(self) -> None:
        """Ends all connections. May be called again."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            open_, threads = list(self._open), list(self._threads)
        for sock in open_:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in [self._acceptor, *threads]:
            thread.join(UPSTREAM_PATIENCE)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), name="proxied", daemon=True)
            with self._lock:
                self._open.add(sock)
                self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reset = False
        try:
            reader = Reader(sock)
            while not self._closing.is_set():
                self._one(sock, reader)
        except _Close as close:
            reset = close.reset
        except (HungUp, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - a thread's edge: spoiling() raises it
            self.broken.append(error)
        finally:
            _end(sock, reset=reset)
            with self._lock:
                self._open.discard(sock)
                self._threads.discard(threading.current_thread())

    def _one(self, sock: socket.socket, reader: Reader) -> None:
        head = reader.head()
        first = Message(head, b"", b"")
        request = request_of(first.method, first.target, first.header("range"))
        fault = self.plan(request)
        if first.header("expect").lower() == "100-continue":
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is not None and fault.kind in SPOILT_REQUESTS:
            self._spoil_request(sock, reader, head, request, fault)
        message = reader.request(head)
        if fault is None or fault.kind is Kind.DELAYED:
            self._pass(sock, message, request, fault)
        elif fault.kind is Kind.FLIP_REQUEST:
            self._pass_flipped(sock, message, request, fault)
        elif fault.kind in RUBBISH:
            self._answer_with_rubbish(sock, message, request, fault)
        elif fault.kind in SAID_INSTEAD and fault.kind is not Kind.LANDED_500:
            self._note(request, fault, 0)
            _send(sock, _made_up(fault.kind, message.method).raw)
        else:
            self._spoil_answer(sock, message, request, fault)

    def _pass(self, sock: socket.socket, message: Message, request: Request, fault: Fault | None) -> None:
        """Carry the request out and pass the answer on."""
        answer = self._ask(message)
        if fault is not None and fault.kind is Kind.DELAYED:
            self._closing.wait(self.delay)
        self._note(request, fault, answer.status)
        sock.sendall(answer.raw)
        if message.is_last or answer.is_last:
            raise _Close

    def _pass_flipped(self, sock: socket.socket, message: Message, request: Request, fault: Fault) -> None:
        wire = _flipped(message.wire, fault.at)
        self._pass(sock, Message(message.head, wire, wire), request, fault if wire else None)

    def _spoil_request(
        self, sock: socket.socket, reader: Reader, head: bytes, request: Request, fault: Fault
    ) -> NoReturn:
        reader.request(head, lambda length: int(length * fault.at))
        self._note(request, fault, 0)
        if fault.kind is Kind.STALL_REQUEST:
            self._wait_for_end(sock)
        raise _Close(reset=fault.kind is Kind.RESET_REQUEST)

    def _answer_with_rubbish(self, sock: socket.socket, message: Message, request: Request, fault: Fault) -> None:
        self._note(request, fault, 0)
        if fault.kind is Kind.GARBAGE:
            _send(sock, NOT_HTTP)
            raise _Close
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(PORTAL_PAGE)
        _send(sock, head + (b"" if message.method == "HEAD" else PORTAL_PAGE))

    def _spoil_answer(self, sock: socket.socket, message: Message, request: Request, fault: Fault) -> None:
        answer = self._ask(message)
        applied = None if fault.kind in BODIES and not answer.body else fault
        self._note(request, applied, answer.status)
        if applied is None:
            sock.sendall(answer.raw)
        else:
            self._send_spoilt(sock, answer, message.method, fault)
        if message.is_last or answer.is_last:
            raise _Close

    def _send_spoilt(self, sock: socket.socket, answer: Message, method: str, fault: Fault) -> None:
        body, place = answer.body, int(len(answer.body) * fault.at)
        match fault.kind:
            case Kind.CUT_ANSWER | Kind.RESET_ANSWER:
                _send(sock, answer.raw[: int(len(answer.raw) * fault.at)])
                raise _Close(reset=fault.kind is Kind.RESET_ANSWER)
            case Kind.STALL_ANSWER:
                _send(sock, answer.raw[: int(len(answer.raw) * fault.at)])
                self._wait_for_end(sock)
                raise _Close
            case Kind.FLIP_ANSWER:
                _send(sock, answer.with_body(_flipped(body, fault.at)).raw)
            case Kind.TRUNCATED:
                _send(sock, answer.with_body(body[:place]).raw)
            case Kind.LONGER:
                _send(sock, answer.with_body(body, length=len(body) + 1 + place).raw)
                raise _Close
            case Kind.SHORTER:
                _send(sock, answer.with_body(body, length=place).raw)
            case Kind.LANDED_500:
                _send(sock, _made_up(fault.kind, method).raw)
            case _:
                raise _Close(reset=True)

    def _ask(self, message: Message) -> Message:
        """The server's answer. On a connection of its own, so that no kept one can turn out to be closed."""
        with socket.create_connection(self._upstream, UPSTREAM_PATIENCE) as upstream:
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = Reader(upstream)
            # A server may answer, and close, before it has read all.
            with suppress(BrokenPipeError, ConnectionResetError):
                upstream.sendall(message.raw)
            return reader.answer(message.method)

    def _note(self, request: Request, fault: Fault | None, status: int) -> None:
        with self._lock:
            self._seen.append(Seen(request, fault, status))

    def _wait_for_end(self, sock: socket.socket) -> None:
        """Until the client hangs up, whatever it has sent meanwhile."""
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        give_up = time.monotonic() + LONGEST_STALL
        while not self._closing.is_set() and time.monotonic() < give_up and not poll.poll(POLL * 1000):
            pass


@contextmanager
def spoiling(upstream: str, plan: Plan = nothing, *, delay: float = 0.1) -> Iterator[Proxy]:
    """A proxy before ``upstream`` while the block runs. Raises what went wrong in the proxy itself, or in its plan."""
    proxy = Proxy(upstream, plan, delay=delay)
    try:
        yield proxy
    finally:
        proxy.close()
        if proxy.broken:
            raise ExceptionGroup("the proxy is at fault", proxy.broken)


def _send(sock: socket.socket, data: bytes) -> None:
    """A client may hang up as soon as it knows enough."""
    try:
        sock.sendall(data)
    except OSError:
        raise _Close from None


def _flipped(data: bytes, at: float) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    bit = int(len(data) * 8 * at)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _made_up(kind: Kind, method: str) -> Message:
    status, code = SAID_INSTEAD[kind]
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>made up</Message></Error>'.encode()
    )
    head = f"HTTP/1.1 {status} Spoilt\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    shown = b"" if method == "HEAD" else body
    return Message(head.encode(), shown, shown)


def _end(sock: socket.socket, *, reset: bool) -> None:
    with suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            sock.shutdown(socket.SHUT_WR)
            _drain(sock)
    sock.close()


def _drain(sock: socket.socket) -> None:
    sock.settimeout(DRAIN)
    give_up = time.monotonic() + DRAIN
    while time.monotonic() < give_up and sock.recv(1 << 16):
        pass
