"""Where keys for OBS come from, and how they are renewed: against a metadata service of its own kind."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runner.errors import AccessDenied, CredentialsExpired, StoreUnreachable
from runner.storage.obs.bucket import ObsBucket
from runner.storage.obs.credentials import LOOK_AGAIN_AFTER, MARGIN, Credentials, Keys
from tests.servers.obs import Credential, ObsServer, obs_server

NOBODY = "http://127.0.0.1:9"
OBS = {"OBS_ACCESS_KEY_ID": "a", "OBS_SECRET_ACCESS_KEY": "s"}


class Metadata:
    """What the service tells, and what it was asked."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.keys: Keys | None = Keys("first", "secret", "token", time.time() + 3600)
        self.body: bytes | None = None
        self.status = 200
        self.wants_session = True
        self.asked: list[str] = []

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, bytes]:
        self.asked.append(f"{method} {path}")
        if self.status != 200:
            return self.status, b""
        if (method, path) == ("PUT", "/meta-data/latest/api/token"):
            return (200, b"session") if self.wants_session else (404, b"no such page")
        if self.wants_session and headers.get("X-Metadata-Token") != "session":
            return 401, b""
        if path != "/openstack/latest/securitykey" or self.keys is None:
            return 404, b""
        return 200, self.body if self.body is not None else self._document(self.keys)

    @staticmethod
    def _document(keys: Keys) -> bytes:
        end = datetime.fromtimestamp(keys.expires, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        told = {"access": keys.access, "secret": keys.secret, "securitytoken": keys.token, "expires_at": end}
        return json.dumps({"credential": told}).encode()


@contextmanager
def serving(metadata: Metadata) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            status, body = metadata.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815 - http.server's name

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    metadata.endpoint = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    told = Metadata()
    with serving(told):
        yield told


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = time.time()

    def now(self) -> float:
        return self.time


def test_keys_of_the_environment_come_first(metadata: Metadata) -> None:
    environ = {**OBS, "HUAWEICLOUD_SDK_AK": "other", "HUAWEICLOUD_SDK_SK": "other"}
    assert Credentials(environ, metadata=metadata.endpoint).keys() == Keys("a", "s", None, math.inf)
    environ["OBS_SECURITY_TOKEN"] = "t"
    assert Credentials(environ, metadata=metadata.endpoint).keys() == Keys("a", "s", "t", math.inf)
    assert metadata.asked == []


def test_the_names_of_huaweis_other_sdks() -> None:
    environ = {"HUAWEICLOUD_SDK_AK": "a", "HUAWEICLOUD_SDK_SK": "s", "HUAWEICLOUD_SDK_SECURITY_TOKEN": "t"}
    assert Credentials(environ, metadata=NOBODY).keys() == Keys("a", "s", "t")
    assert Credentials({"OBS_ACCESS_KEY_ID": "half", **environ}, metadata=NOBODY).keys().access == "a"


def test_without_any_it_says_what_to_set(metadata: Metadata) -> None:
    metadata.keys = None
    for place in (NOBODY, metadata.endpoint):
        with pytest.raises(AccessDenied) as caught:
            Credentials({}, metadata=place).keys()
        assert "OBS_ACCESS_KEY_ID" in caught.value.hint
        assert "OBS_SECRET_ACCESS_KEY" in caught.value.hint


@pytest.mark.parametrize("wants_session", [True, False])
def test_a_machines_agency_gives_keys(metadata: Metadata, wants_session: bool) -> None:
    metadata.wants_session = wants_session
    environ = {"http_proxy": NOBODY, "HTTP_PROXY": NOBODY}
    found = Credentials(environ, metadata=metadata.endpoint).keys()
    assert metadata.keys is not None
    assert (found.access, found.secret, found.token) == ("first", "secret", "token")
    assert found.expires == pytest.approx(metadata.keys.expires, abs=1)


def test_keys_are_renewed_before_they_run_out(metadata: Metadata) -> None:
    clock = Hand()
    credentials = Credentials({}, metadata=metadata.endpoint, clock=clock)
    first = credentials.keys()
    asked = len(metadata.asked)
    clock.time = first.expires - MARGIN - 1
    assert credentials.keys() is first
    assert len(metadata.asked) == asked
    metadata.keys = Keys("second", "secret", "token", first.expires + 3600)
    clock.time += 2
    assert credentials.keys().access == "second"


def test_a_service_that_is_out_of_order_is_asked_again_while_the_old_keys_last(metadata: Metadata) -> None:
    clock = Hand()
    credentials = Credentials({}, metadata=metadata.endpoint, clock=clock)
    first = credentials.keys()
    metadata.status = 500
    clock.time = first.expires - 100
    assert credentials.keys() is first
    asked = len(metadata.asked)
    assert credentials.keys() is first
    assert len(metadata.asked) == asked  # not with every request
    clock.time = first.expires + 1
    with pytest.raises(StoreUnreachable):
        credentials.keys()
    metadata.status = 200
    metadata.keys = Keys("second", "secret", "token", clock.time + 3600)
    clock.time += LOOK_AGAIN_AFTER
    assert credentials.keys().access == "second"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"credential": {"secret": "hidden"}}'])
def test_rubbish_is_no_keys_and_is_not_quoted(metadata: Metadata, body: bytes) -> None:
    metadata.body = body
    with pytest.raises(StoreUnreachable) as caught:
        Credentials({}, metadata=metadata.endpoint).keys()
    assert "hidden" not in caught.value.message


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(Keys("a", "hidden", "hidden"))


# With a store


@pytest.fixture
def server() -> Iterator[ObsServer]:
    with obs_server() as running:
        running.make_bucket("b")
        yield running


def issue(server: ObsServer, metadata: Metadata, name: str) -> None:
    """Temporary keys that the store knows, from now on in the place of those before."""
    metadata.keys = Keys(name, f"{name}-secret", f"{name}-token", time.time() + 3600)
    server.credentials[name] = Credential(f"{name}-secret", f"{name}-token")


@pytest.mark.parametrize("how", ["expired", "forgotten", "another token"])
def test_keys_that_the_store_refuses_are_renewed(server: ObsServer, metadata: Metadata, how: str) -> None:
    clock = Hand()
    issue(server, metadata, "first")
    credentials = Credentials({}, metadata=metadata.endpoint, clock=clock)
    bucket = ObsBucket("b", server.access(endpoint=server.virtual, environ={}), credentials=credentials)
    bucket.put("k", b"x")
    assert server.requests[-1].headers["x-obs-security-token"] == "first-token"
    if how == "forgotten":
        del server.credentials["first"]
    else:
        server.credentials["first"] = (
            Credential("first-secret", "first-token", expires=0.0)
            if how == "expired"
            else Credential("first-secret", "another")
        )
    issue(server, metadata, "second")
    clock.time += LOOK_AGAIN_AFTER
    with pytest.raises(CredentialsExpired) as caught:
        bucket.page("", None)
    assert caught.value.retryable
    assert [info.key for info in bucket.page("", None).objects] == ["k"]
    assert server.requests[-1].headers["x-obs-security-token"] == "second-token"


def test_keys_that_cannot_be_renewed_stay_refused(server: ObsServer) -> None:
    environ = {"OBS_ACCESS_KEY_ID": "gone", "OBS_SECRET_ACCESS_KEY": "s"}
    bucket = ObsBucket("b", server.access(environ=environ))
    for _ in range(2):
        with pytest.raises(AccessDenied) as caught:
            bucket.page("", None)
        assert not caught.value.retryable


def test_a_machine_without_keys_asks_nothing_of_the_store(server: ObsServer) -> None:
    bucket = ObsBucket("b", server.access(environ={}), credentials=Credentials({}, metadata=NOBODY))
    with pytest.raises(AccessDenied):
        bucket.page("", None)
    assert server.requests == []
