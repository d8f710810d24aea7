"""The spoiling proxy can be trusted: without faults every byte passes, and each fault is what it says, on the wire."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.plans import SAID_INSTEAD, EveryNth, Fault, Kind, Once, RandomPlan, Request, nothing, request_of
from tests.faults.proxy import Proxy, spoiling

BODY = bytes(range(256)) * 4
ANSWER = b"HTTP/1.1 200 OK\r\nX-Odd:  spaces kept \r\nContent-Length: 1024\r\n\r\n" + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: t\r\n\r\n"
)
GET = b"GET /b/k%20ey?list-type=2&prefix=%2F HTTP/1.1\r\nHost: some.where:99\r\nAuthorization: AWS4 x\r\n\r\n"
PUT = b"PUT /b/key HTTP/1.1\r\nHost: some.where:99\r\ncontent-length: 1024\r\nX-Amz-Y:z\r\n\r\n" + BODY


class Upstream:
    """Takes one request per connection, as many bytes as are sent in one go, and gives a fixed answer."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.got: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(0.1)
                got = bytearray()
                try:
                    while data := sock.recv(1 << 16):
                        got += data
                except TimeoutError:
                    pass
                self.got.append(bytes(got))
                sock.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@contextmanager
def pair(*faults: Fault, answer: bytes = ANSWER) -> Iterator[tuple[Upstream, Proxy]]:
    upstream = Upstream(answer)
    try:
        with spoiling(upstream.endpoint, Once(*faults)) as proxy:
            yield upstream, proxy
    finally:
        upstream.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(proxy.endpoint.rpartition(":")[2])), 10)


def received(sock: socket.socket, count: int | None = None) -> bytes:
    """So many bytes, or all until the connection ends."""
    got = bytearray()
    while count is None or len(got) < count:
        data = sock.recv(1 << 16)
        if not data:
            break
        got += data
    return bytes(got)


@pytest.mark.parametrize("sent", [GET, PUT], ids=["get", "put"])
@pytest.mark.parametrize(
    "answer", [ANSWER, CHUNKED, b"HTTP/1.1 204 No Content\r\n\r\n"], ids=["plain", "chunked", "empty"]
)
def test_without_faults_every_byte_passes_both_ways(sent: bytes, answer: bytes) -> None:
    with pair(answer=answer) as (upstream, proxy), connect(proxy) as sock:
        for _ in range(2):  # the client's connection is kept
            sock.sendall(sent)
            assert received(sock, len(answer)) == answer
        assert upstream.got == [sent, sent]
        assert [seen.fault for seen in proxy.seen] == [None, None]


def test_a_request_that_waits_for_100_continue_is_told_to_go_on() -> None:
    head, _, body = PUT.partition(b"\r\n\r\n")
    head += b"\r\nExpect: 100-continue\r\n\r\n"
    with pair(answer=b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER) as (upstream, proxy), connect(proxy) as sock:
        sock.sendall(head)
        assert received(sock, 25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert received(sock, len(ANSWER)) == ANSWER
        assert upstream.got == [head + body]


def test_a_head_request_has_no_body_to_wait_for() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n"
    with pair(answer=answer) as (_, proxy), connect(proxy) as sock:
        sock.sendall(GET.replace(b"GET", b"HEAD"))
        assert received(sock, len(answer)) == answer


@pytest.mark.parametrize("kind", [Kind.CUT_REQUEST, Kind.RESET_REQUEST])
def test_a_request_is_cut(kind: Kind) -> None:
    with pair(Fault(kind)) as (upstream, proxy), connect(proxy) as sock:
        sock.sendall(PUT)
        if kind is Kind.CUT_REQUEST:
            assert received(sock) == b""
        else:
            with pytest.raises(ConnectionResetError):
                received(sock)
        assert upstream.got == []
        assert proxy.done == {kind: 1}


@pytest.mark.parametrize("at", [0.0, 0.01, 0.5, 0.9999])
def test_an_answer_is_cut_where_the_plan_says(at: float) -> None:
    with pair(Fault(Kind.CUT_ANSWER, at)) as (upstream, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        assert received(sock) == ANSWER[: int(len(ANSWER) * at)]
        assert upstream.got == [GET]
        assert proxy.done == {Kind.CUT_ANSWER: 1}


@pytest.mark.parametrize(("kind", "at", "arrives"), [(Kind.RESET_ANSWER, 0.5, len(ANSWER) // 2), (Kind.LANDED, 0.5, 0)])
def test_an_answer_is_reset(kind: Kind, at: float, arrives: int) -> None:
    with pair(Fault(kind, at)) as (upstream, proxy), connect(proxy) as sock:
        sock.sendall(PUT)
        assert received(sock, arrives) == ANSWER[:arrives]
        with pytest.raises(ConnectionResetError):
            received(sock)
        assert upstream.got == [PUT]
        assert [(seen.fault, seen.status) for seen in proxy.seen] == [(Fault(kind, at), 200)]


@pytest.mark.parametrize(("kind", "arrives", "lands"), [(Kind.STALL_REQUEST, 0, 0), (Kind.STALL_ANSWER, 500, 1)])
def test_a_stall_lasts_until_the_client_goes(kind: Kind, arrives: int, lands: int) -> None:
    with pair(Fault(kind, 500.5 / len(ANSWER))) as (upstream, proxy):
        sock = connect(proxy)
        sock.sendall(PUT)
        assert received(sock, arrives) == ANSWER[:arrives]
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.close()
        began = time.monotonic()
        proxy.close()
        assert time.monotonic() - began < 5
        assert len(upstream.got) == lands
        assert proxy.done == {kind: 1}


@pytest.mark.parametrize("kind", SAID_INSTEAD)
def test_an_answer_is_made_up(kind: Kind) -> None:
    status, code = SAID_INSTEAD[kind]
    with pair(Fault(kind)) as (upstream, proxy):
        client = http.client.HTTPConnection("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]), timeout=10)
        client.request("PUT", "/b/key", BODY)
        answer = client.getresponse()
        assert answer.status == status
        assert f"<Code>{code}</Code>".encode() in answer.read()
        assert len(upstream.got) == (1 if kind is Kind.LANDED_500 else 0)
        client.request("GET", "/b/key")  # on the same connection
        assert client.getresponse().read() == BODY
        client.close()


def test_garbage_is_no_http() -> None:
    with pair(Fault(Kind.GARBAGE)) as (upstream, proxy):
        client = http.client.HTTPConnection("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]), timeout=10)
        client.request("GET", "/b/key")
        with pytest.raises(http.client.BadStatusLine):
            client.getresponse()
        assert upstream.got == []
        client.close()


def test_a_portal_answers_200_with_its_page() -> None:
    with pair(Fault(Kind.PORTAL)) as (upstream, proxy):
        client = http.client.HTTPConnection("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]), timeout=10)
        client.request("GET", "/b/key")
        answer = client.getresponse()
        assert (answer.status, answer.getheader("etag")) == (200, None)
        assert b"sign in" in answer.read()
        assert upstream.got == []
        client.close()


def differing_bits(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("at", [0.0, 0.3, 0.99999])
def test_one_bit_of_an_answers_body_is_flipped(at: float) -> None:
    with pair(Fault(Kind.FLIP_ANSWER, at)) as (upstream, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        head, _, body = received(sock, len(ANSWER)).partition(b"\r\n\r\n")
        assert head == ANSWER.partition(b"\r\n\r\n")[0]
        assert differing_bits(body, BODY) == 1
        assert upstream.got == [GET]


def test_one_bit_of_a_requests_body_is_flipped() -> None:
    with pair(Fault(Kind.FLIP_REQUEST, 0.7)) as (upstream, proxy), connect(proxy) as sock:
        sock.sendall(PUT)
        assert received(sock, len(ANSWER)) == ANSWER
        head, _, body = upstream.got[0].partition(b"\r\n\r\n")
        assert head == PUT.partition(b"\r\n\r\n")[0]
        assert differing_bits(body, BODY) == 1
        assert proxy.done == {Kind.FLIP_REQUEST: 1}


def test_a_body_is_truncated_with_a_length_that_agrees() -> None:
    with pair(Fault(Kind.TRUNCATED, 0.5), answer=CHUNKED) as (_, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        expected = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
        assert received(sock, len(expected)) == expected
        sock.sendall(GET)  # the connection is kept
        assert received(sock, len(CHUNKED)) == CHUNKED


def test_a_length_that_promises_too_much() -> None:
    with pair(Fault(Kind.LONGER, 0.5)) as (_, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        head, _, body = received(sock).partition(b"\r\n\r\n")
        assert b"Content-Length: 1537" in head
        assert body == BODY


def test_a_length_that_promises_too_little() -> None:
    with pair(Fault(Kind.SHORTER, 0.5)) as (_, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        head, _, body = received(sock, len(ANSWER) - 1).partition(b"\r\n\r\n")
        assert b"Content-Length: 512" in head
        assert body == BODY
        sock.sendall(GET)  # the connection is kept
        assert received(sock, len(ANSWER)) == ANSWER


def test_an_answer_comes_late() -> None:
    with pair(Fault(Kind.DELAYED)) as (_, proxy), connect(proxy) as sock:
        proxy.delay = 0.4
        sock.settimeout(0.3)
        sock.sendall(GET)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(10)
        assert received(sock, len(ANSWER)) == ANSWER
        assert proxy.done == {Kind.DELAYED: 1}


@pytest.mark.parametrize("kind", [Kind.FLIP_ANSWER, Kind.TRUNCATED, Kind.LONGER, Kind.SHORTER])
def test_what_could_not_be_done_is_not_counted(kind: Kind) -> None:
    with pair(Fault(kind), answer=b"HTTP/1.1 204 No Content\r\n\r\n") as (_, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        assert received(sock, 27) == b"HTTP/1.1 204 No Content\r\n\r\n"
        assert proxy.done == {}


def test_every_kind_is_tried_above() -> None:
    """The parametrised tests and the named ones together; a new kind has to be added here by hand."""
    tried = {*SAID_INSTEAD, Kind.CUT_REQUEST, Kind.RESET_REQUEST, Kind.CUT_ANSWER, Kind.RESET_ANSWER, Kind.LANDED}
    tried |= {Kind.STALL_REQUEST, Kind.STALL_ANSWER, Kind.GARBAGE, Kind.PORTAL, Kind.FLIP_ANSWER, Kind.FLIP_REQUEST}
    tried |= {Kind.TRUNCATED, Kind.LONGER, Kind.SHORTER, Kind.DELAYED}
    assert tried == set(Kind)


REQUEST = request_of("GET", "/b/k?partNumber=2&uploadId=abc&X-Amz-Signature=1", "bytes=0-9")


def test_tries_of_one_request_have_one_identity() -> None:
    again = request_of("GET", "/b/k?X-Amz-Signature=2&uploadId=def&partNumber=2", "bytes=0-9")
    assert REQUEST.identity == again.identity
    for target, range_ in (("/b/k?partNumber=3", "bytes=0-9"), ("/b/k?partNumber=2", "bytes=0-8"), ("/b/x", "")):
        assert request_of("GET", target, range_).identity != REQUEST.identity


def test_a_random_plan_is_the_same_again_whatever_is_asked_in_between() -> None:
    weights = {Kind.LANDED: 1.0, Kind.SLOW_DOWN: 3.0}
    one = RandomPlan(7, weights, probability=0.5)
    other = RandomPlan(7, weights, probability=0.5)
    alone = [one(REQUEST) for _ in range(200)]
    amid = []
    for number in range(200):
        other(Request("GET", f"/b/{number}", {}))
        amid.append(other(REQUEST))
    assert alone == amid
    assert {fault.kind for fault in alone if fault} == set(weights)
    third = RandomPlan(8, weights, probability=0.5)
    assert [third(REQUEST) for _ in range(200)] != alone


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_a_random_plan_lets_a_request_pass_in_the_end(in_a_row: int) -> None:
    plan = RandomPlan(1, {Kind.LANDED: 1}, probability=1.0, in_a_row=in_a_row)
    asked = [plan(REQUEST) is not None for _ in range(2 * in_a_row + 2)]
    assert asked == ([True] * in_a_row + [False]) * 2


def test_a_random_plan_spares_what_it_is_told_to() -> None:
    plan = RandomPlan(1, {Kind.LANDED: 1}, probability=1.0, allowed=lambda request, _kind: request.method == "PUT")
    assert plan(REQUEST) is None
    assert plan(Request("PUT", "/b/k", {})) is not None


def test_every_nth() -> None:
    plan = EveryNth(3, Fault(Kind.LANDED), lambda request: request.method == "PUT")
    put = Request("PUT", "/b/k", {})
    assert [plan(request) is not None for request in (put, REQUEST, put, put, put, put, put)] == [
        False, False, False, True, False, False, True
    ]  # fmt: skip


def test_closing_ends_what_is_open() -> None:
    with pair() as (_, proxy), connect(proxy) as sock:
        sock.sendall(GET)
        received(sock, len(ANSWER))
        proxy.close()
        assert received(sock) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)


def test_a_plan_that_fails_is_told() -> None:
    def broken(_request: Request) -> Fault | None:
        raise ZeroDivisionError

    def ask() -> None:
        with pair() as (_, proxy):
            proxy.plan = broken
            with connect(proxy) as sock:
                sock.sendall(GET)
                assert received(sock) == b""

    with pytest.raises(ExceptionGroup, match="the proxy is at fault"):
        ask()


def test_nothing_is_the_plan_by_default() -> None:
    assert nothing(REQUEST) is None
