"""Profiles that log in through SSO: a portal changes the token that ``aws sso login`` left into a role's keys.

botocore finds the token's folder by HOME when it is loaded, so that each look is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.servers.web import Reply, Seen, Web, answering

START = "https://portal.example.com/start"
EMPTY = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"

PROFILE = """
[profile trainer]
{where}
sso_account_id = 123456789012
sso_role_name = Trainer
region = eu-west-3
services = here
[services here]
sso =
  endpoint_url = {portal}
sso_oidc =
  endpoint_url = {portal}
"""
OF_OLD = f"sso_start_url = {START}\nsso_region = eu-west-3"
BY_SESSION = f"sso_session = ours\n[sso-session ours]\n{OF_OLD}\nsso_registration_scopes = sso:account:access\n"

LOOK = """
import os, sys
from runner.errors import CloudrunError
from runner.storage.access import Access
from runner.storage.s3 import S3Bucket

bucket = S3Bucket("bucket", Access(endpoint=sys.argv[1], profile="trainer", environ=dict(os.environ)))
try:
    for _ in range(int(sys.argv[2])):
        bucket.page("", None)
except CloudrunError as error:
    print(f"{type(error).__name__}: {error.message} | {error.hint}")
"""


def at(lasts: timedelta) -> datetime:
    return datetime.now(UTC) + lasts


def leave_token(home: Path, lasts: timedelta, *, session: str | None = None, **more: str) -> None:
    """What ``aws sso login`` leaves."""
    folder = home / ".aws/sso/cache"
    folder.mkdir(parents=True)
    token = {"accessToken": "the-token", "expiresAt": at(lasts).strftime("%Y-%m-%dT%H:%M:%SZ"), "startUrl": START}
    name = hashlib.sha1((session or START).encode()).hexdigest()
    (folder / f"{name}.json").write_text(json.dumps({**token, "region": "eu-west-3", **more}))


def write_profile(home: Path, portal: Web, where: str) -> None:
    text = PROFILE.format(where="{where}", portal=portal.url)
    first, session, rest = where.partition("[sso-session")
    (home / ".aws").mkdir(parents=True, exist_ok=True)
    (home / ".aws/config").write_text(text.replace("{where}", first) + session + rest)


def look(home: Path, store: Web, times: int = 1) -> str:
    """Ask the store as often; what went wrong, or nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "HTTP"))}
    environ = {**kept, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}
    environ |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, store.url, str(times)],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def granted(number: int, lasts: timedelta) -> Reply:
    keys: dict[str, Any] = {"accessKeyId": f"key-{number}", "secretAccessKey": "hunter22", "sessionToken": "session"}
    keys["expiration"] = int(at(lasts).timestamp() * 1000)
    return Reply(body=json.dumps({"roleCredentials": keys}).encode(), headers={"Content-Type": "application/json"})


def grant(_request: Seen) -> Reply:
    return granted(1, timedelta(hours=1))


def store(_request: Seen) -> Reply:
    return Reply(body=EMPTY)


def signers(web: Web) -> list[str]:
    return [seen.headers["authorization"].partition("Credential=")[2].partition("/")[0] for seen in web.seen]


def test_a_profile_of_old(tmp_path: Path) -> None:
    leave_token(tmp_path, timedelta(hours=8))
    with answering(grant) as portal, answering(store) as server:
        write_profile(tmp_path, portal, OF_OLD)
        assert look(tmp_path, server, times=3) == ""
        assert signers(server) == ["key-1"] * 3
        assert {seen.headers["x-amz-security-token"] for seen in server.seen} == {"session"}
        (asked,) = portal.seen
        assert asked.url.startswith("/federation/credentials?")
        assert set(asked.url.partition("?")[2].split("&")) == {"role_name=Trainer", "account_id=123456789012"}
        assert asked.headers["x-amz-sso_bearer_token"] == "the-token"
        assert "authorization" not in asked.headers


def test_a_profile_with_a_session(tmp_path: Path) -> None:
    leave_token(tmp_path, timedelta(hours=8), session="ours")
    with answering(grant) as portal, answering(store) as server:
        write_profile(tmp_path, portal, BY_SESSION)
        assert look(tmp_path, server) == ""
        assert signers(server) == ["key-1"]
        assert [seen.headers["x-amz-sso_bearer_token"] for seen in portal.seen] == ["the-token"]


def test_a_session_renews_its_token(tmp_path: Path) -> None:
    """One that still lasts some minutes is renewed with what the login left for that."""

    def reply(request: Seen) -> Reply:
        if request.url == "/token":
            body = {"accessToken": "a-newer-token", "tokenType": "Bearer", "expiresIn": 3600, "refreshToken": "next"}
            return Reply(body=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
        return granted(1, timedelta(hours=1))

    renewal = {"clientId": "client", "clientSecret": "its-secret", "refreshToken": "refresh"}
    renewal |= {"registrationExpiresAt": at(timedelta(days=30)).strftime("%Y-%m-%dT%H:%M:%SZ")}
    leave_token(tmp_path, timedelta(minutes=5), session="ours", **renewal)
    with answering(reply) as portal, answering(store) as server:
        write_profile(tmp_path, portal, BY_SESSION)
        assert look(tmp_path, server) == ""
        assert signers(server) == ["key-1"]
        renewing, asked = portal.seen
        assert json.loads(renewing.body)["refreshToken"] == "refresh"
        assert asked.headers["x-amz-sso_bearer_token"] == "a-newer-token"


def test_keys_of_a_role_are_renewed_before_they_run_out(tmp_path: Path) -> None:
    numbers = iter(range(1, 10))

    def reply(_request: Seen) -> Reply:
        number = next(numbers)
        return granted(number, timedelta(minutes=5) if number == 1 else timedelta(hours=1))

    leave_token(tmp_path, timedelta(hours=8))
    with answering(reply) as portal, answering(store) as server:
        write_profile(tmp_path, portal, OF_OLD)
        assert look(tmp_path, server, times=2) == ""
        assert signers(server) == ["key-2", "key-2"]
        assert len(portal.seen) == 2


@pytest.mark.parametrize(
    ("where", "left"),
    [
        pytest.param(OF_OLD, "an old token", id="of old, an old token"),
        pytest.param(OF_OLD, "none", id="of old, no token"),
        pytest.param(BY_SESSION, "none", id="by session, no token"),
        pytest.param(
            BY_SESSION,
            "an old token",
            id="by session, an old token",
        ),
    ],
)
def test_who_must_log_in_again_is_told(tmp_path: Path, where: str, left: str) -> None:
    if left == "an old token":
        leave_token(tmp_path, timedelta(hours=-1), session="ours" if where == BY_SESSION else None)
    with answering(grant) as portal, answering(store) as server:
        write_profile(tmp_path, portal, where)
        said = look(tmp_path, server)
        assert said.startswith("AccessDenied: no credentials for S3")
        assert "aws sso login" in said
        assert "the-token" not in said
        assert (portal.seen, server.seen) == ([], [])


def test_a_portal_that_knows_the_token_no_more(tmp_path: Path) -> None:
    body = json.dumps({"message": "Session token not found or invalid"}).encode()
    refused = Reply(401, body, {"x-amzn-ErrorType": "UnauthorizedException", "Content-Type": "application/json"})
    leave_token(tmp_path, timedelta(hours=8))
    with answering(lambda _: refused) as portal, answering(store) as server:
        write_profile(tmp_path, portal, OF_OLD)
        said = look(tmp_path, server)
        assert said.startswith("AccessDenied: no credentials for S3")
        assert "aws sso login" in said
        assert len(portal.seen) == 1


def test_a_role_that_is_not_ours(tmp_path: Path) -> None:
    body = json.dumps({"message": "No access"}).encode()
    refused = Reply(403, body, {"x-amzn-ErrorType": "ForbiddenException", "Content-Type": "application/json"})
    leave_token(tmp_path, timedelta(hours=8))
    with answering(lambda _: refused) as portal, answering(store) as server:
        write_profile(tmp_path, portal, OF_OLD)
        said = look(tmp_path, server)
        assert "no credentials for S3" in said
        assert "No access" in said
        assert "the-token" not in said
        assert server.seen == []
