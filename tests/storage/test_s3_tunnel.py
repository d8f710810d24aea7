"""S3 over TLS through a proxy that opens tunnels, with certificates of an authority of our own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import StoreUnreachable
from runner.storage.s3 import S3Bucket
from tests.servers import Server, rclone
from tests.servers.tunnel import Tunnels, tunnelling

NAME = "s3.cloudrun.invalid"
"""Resolves nowhere: whoever reaches the server by it has gone through the proxy."""

PART = 5 << 20
LOGIN = "somebody:hunter22"


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``ca.pem``, to be trusted, and ``server.pem``, a server's certificate by it with its key."""
    folder = tmp_path_factory.mktemp("authority")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2")
    openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=throw-away authority",
            "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    openssl(folder, "req", "-x509", *key, "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "own.key", "-out", "own.pem",
            "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    # The whole chain, so that whoever asks whether the server is ready may trust this file.
    parts = [(folder / name).read_text() for name in ("own.pem", "ca.pem", "own.key")]
    (folder / "server.pem").write_text("".join(parts))
    return folder


@pytest.fixture(scope="module")
def store(authority: Path) -> Iterator[Server]:
    """A server with TLS, and a bucket called ``data``."""
    with rclone(authority / "server.pem") as server:
        trusted = replace(server, certificate=authority / "ca.pem")
        trusted.make_bucket("data")
        yield trusted


def port_of(server: Server) -> int:
    return int(server.endpoint.rpartition(":")[2])


@pytest.fixture
def way(store: Server) -> Iterator[Tunnels]:
    with tunnelling({NAME: port_of(store), "127.0.0.1": port_of(store)}) as proxy:
        yield proxy


def bucket(server: Server, *, host: str = NAME, **environ: str) -> S3Bucket:
    endpoint = f"https://{host}:{port_of(server)}"
    trusting = {**server.environ(), "AWS_CA_BUNDLE": str(server.certificate), **environ}
    return S3Bucket("data", server.access(endpoint=endpoint, environ={k: v for k, v in trusting.items() if v}))


def do_everything(one: S3Bucket) -> None:
    """Requests through each of the clients, and an upload in parts."""
    info = one.put("key", b"data")
    with one.get("key", version=info.version) as answer:
        assert b"".join(answer.chunks) == b"data"
    with one.get("key", start=1, length=2) as answer:
        assert b"".join(answer.chunks) == b"at"
    upload = one.begin("large")
    one.finish("large", upload, [one.put_part("large", upload, 1, b"x" * PART)])
    assert [found.key for found in one.page("", None).objects] == ["key", "large"]
    one.delete(["key", "large"])
    assert not one.page("", None).objects


def test_everything_goes_through_the_tunnel(store: Server, way: Tunnels) -> None:
    do_everything(bucket(store, HTTPS_PROXY=way.url))
    assert {(asked.method, asked.target) for asked in way.seen} == {("CONNECT", f"{NAME}:{port_of(store)}")}
    assert len(way.seen) <= 6, "connections are kept"


@pytest.mark.parametrize("variable", ["https_proxy", "ALL_PROXY"])
def test_other_names_of_the_variable(store: Server, way: Tunnels, variable: str) -> None:
    bucket(store, **{variable: way.url}).page("", None)
    assert way.seen


@pytest.mark.parametrize("excluded", ["127.0.0.1", "example.com, 127.0.0.0/8", "*"])
def test_no_proxy_is_honoured(store: Server, way: Tunnels, excluded: str) -> None:
    do_everything(bucket(store, host="127.0.0.1", HTTPS_PROXY=way.url, NO_PROXY=excluded))
    assert way.seen == []


def test_a_proxy_for_http_is_not_for_https(store: Server, way: Tunnels) -> None:
    do_everything(bucket(store, host="127.0.0.1", HTTP_PROXY=way.url))
    assert way.seen == []


REQUESTS: dict[str, Callable[[S3Bucket], object]] = {
    "list": lambda one: one.page("", None),
    "put": lambda one: one.put("key", b""),
    "head": lambda one: one.head("key"),
    "begin": lambda one: one.begin("key"),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_the_tunnel_does_not_vouch_for_the_server(store: Server, way: Tunnels, request_: str) -> None:
    with pytest.raises(StoreUnreachable, match="ertificate"):
        REQUESTS[request_](bucket(store, HTTPS_PROXY=way.url, AWS_CA_BUNDLE=""))
    assert way.seen


def test_a_proxy_that_wants_a_password_gets_it(store: Server) -> None:
    with tunnelling({NAME: port_of(store)}, login=LOGIN) as proxy:
        do_everything(bucket(store, HTTPS_PROXY=proxy.url))
        assert proxy.seen
        assert all(proxy.admits(asked) for asked in proxy.seen)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_wrong_password_of_a_proxy_is_not_told(store: Server, request_: str) -> None:
    with tunnelling({NAME: port_of(store)}, login=LOGIN) as proxy:
        wrong = proxy.url.replace("hunter22", "hunter23")
        with pytest.raises(StoreUnreachable) as caught:
            REQUESTS[request_](bucket(store, HTTPS_PROXY=wrong))
        assert "hunter" not in str(caught.value) + caught.value.hint
        assert proxy.seen


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_proxy_that_does_not_answer(store: Server, request_: str) -> None:
    with pytest.raises(StoreUnreachable) as caught:
        REQUESTS[request_](bucket(store, HTTPS_PROXY=f"http://{LOGIN}@127.0.0.1:1"))
    assert "hunter22" not in str(caught.value) + caught.value.hint
