"""Who we are to the store: where credentials come from, and that they are renewed while a job runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runner.errors import AccessDenied, CredentialsExpired
from runner.storage.access import Access
from runner.storage.s3 import S3Bucket
from tests.servers import Server
from tests.servers.web import Reply, Seen, answering, proxy

EMPTY = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
ALONE = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}

FreshBucket = Callable[[Server], str]


def granted(number: int, lasts: timedelta) -> dict[str, Any]:
    return {
        "Version": 1,
        "AccessKeyId": f"key-{number}",
        "SecretAccessKey": "secret",
        "SessionToken": f"token-{number}",
        "Token": f"token-{number}",
        "Expiration": (datetime.now(UTC) + lasts).isoformat(),
    }


def process(folder: Path, *answers: dict[str, Any]) -> dict[str, str]:
    """The environment of a profile whose credentials a program prints: the first answer, then the second, ..."""
    for number, answer in enumerate(answers):
        (folder / f"answer-{number}").write_text(json.dumps(answer))
    program = folder / "login.py"
    program.write_text(
        "import pathlib\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "asked = folder / 'asked'\n"
        "number = asked.stat().st_size if asked.exists() else 0\n"
        "asked.open('a').write('x')\n"
        f"print((folder / f'answer-{{min(number, {len(answers) - 1})}}').read_text())\n"
    )
    config = folder / "config"
    config.write_text(f"[profile renewing]\ncredential_process = {sys.executable} {program}\n")
    return {**ALONE, "AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "renewing"}


def who(request: Seen) -> str:
    """The access key that signed."""
    return request.headers["authorization"].partition("Credential=")[2].partition("/")[0]


def ask(bucket: S3Bucket) -> None:
    """A request through each of the three clients."""
    bucket.page("", None)
    with bucket.get("key") as answer:
        assert b"".join(answer.chunks) == b"data"
    bucket.head("key")


def reply(request: Seen) -> Reply:
    if "list-type" in request.url:
        return Reply(body=EMPTY)
    return Reply(body=b"data", headers={"ETag": '"abc"', "Last-Modified": "Mon, 30 Nov 2026 19:42:37 GMT"})


def test_nobody_knows_who_we_are() -> None:
    bucket = S3Bucket("bucket", Access(endpoint="http://127.0.0.1:1", environ=ALONE))
    with pytest.raises(AccessDenied, match="no credentials") as caught:
        bucket.page("", None)
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert not caught.value.retryable


def test_a_profile_that_is_not_there() -> None:
    bucket = S3Bucket("bucket", Access(endpoint="http://127.0.0.1:1", profile="none", environ=ALONE))
    with pytest.raises(AccessDenied, match="none"):
        bucket.page("", None)


def test_the_environment_is_the_one_given_and_no_other(
    seaweedfs: Server, fresh_bucket: FreshBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_SESSION_TOKEN": "none",
        "AWS_PROFILE": "missing",
        "AWS_DEFAULT_REGION": "mars-1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_SKIP_SIGNATURE": "true",
        "HTTP_PROXY": "http://127.0.0.1:1",
        "http_proxy": "http://127.0.0.1:1",
    }
    name = fresh_bucket(seaweedfs)
    for variable, value in wrong.items():
        monkeypatch.setenv(variable, value)
    bucket = S3Bucket(name, seaweedfs.access())
    bucket.put("key", b"data")
    ask(bucket)


def test_endpoint_region_and_profile_come_from_the_environment(
    seaweedfs: Server, fresh_bucket: FreshBucket, tmp_path: Path
) -> None:
    config, keys = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile mine]\nregion = eu-west-3\nendpoint_url = {seaweedfs.endpoint}\n")
    keys.write_text(
        f"[mine]\naws_access_key_id = {seaweedfs.access_key}\naws_secret_access_key = {seaweedfs.secret_key}\n"
    )
    environ = {**ALONE, "AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    name = fresh_bucket(seaweedfs)
    for access in (Access(profile="mine", environ=environ), Access(environ={**environ, "AWS_PROFILE": "mine"})):
        bucket = S3Bucket(name, access)
        bucket.put("key", b"data")
        ask(bucket)


def test_a_named_profile_beats_keys_in_the_environment(tmp_path: Path) -> None:
    environ = process(tmp_path, granted(1, timedelta(hours=1)))
    del environ["AWS_PROFILE"]
    environ |= {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "secret"}
    with answering(reply) as server:
        ask(S3Bucket("bucket", Access(endpoint=server.url, region="x", profile="renewing", environ=environ)))
        assert {who(request) for request in server.seen} == {"key-1"}
        ask(S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=environ)))
        assert {who(request) for request in server.seen} == {"key-1", "other"}


def test_credentials_are_renewed_before_they_run_out(tmp_path: Path) -> None:
    # botocore renews what lasts less than ten minutes.
    environ = process(tmp_path, granted(1, timedelta(minutes=5)), granted(2, timedelta(hours=1)))
    with answering(reply) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=environ))
        ask(bucket)
        ask(bucket)
        assert {who(request) for request in server.seen} == {"key-2"}
        assert {request.headers["x-amz-security-token"] for request in server.seen} == {"token-2"}


@pytest.mark.parametrize("client", range(3))
def test_what_the_store_calls_expired_is_asked_for_again(tmp_path: Path, client: int) -> None:
    def refuse_the_first(request: Seen) -> Reply:
        return Reply(400, EXPIRED) if who(request) == "key-0" else reply(request)

    environ = process(tmp_path, granted(0, timedelta(hours=1)), granted(1, timedelta(hours=1)))
    with answering(refuse_the_first) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=environ))
        requests: list[Callable[[], object]] = [
            lambda: bucket.page("", None),
            lambda: bucket.get("key").__enter__(),
            lambda: bucket.begin("key"),
        ]
        with pytest.raises(CredentialsExpired) as caught:
            requests[client]()
        assert caught.value.retryable
        assert "token-0" not in str(caught.value)
        ask(bucket)
        assert {who(request) for request in server.seen[1:]} == {"key-1"}


def test_a_source_that_fails_may_come_right(tmp_path: Path) -> None:
    environ = process(tmp_path, {"Version": 2}, granted(1, timedelta(hours=1)))
    with answering(reply) as server:
        bucket = S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=environ))
        with pytest.raises(CredentialsExpired) as caught:
            bucket.page("", None)
        assert caught.value.retryable
        ask(bucket)


def test_a_container_is_asked_and_never_through_a_proxy() -> None:
    def grant(request: Seen) -> Reply:
        assert request.headers["authorization"] == "container-token"
        return Reply(body=json.dumps(granted(7, timedelta(hours=1))).encode())

    with answering(grant) as metadata, answering(reply) as server, proxy() as way:
        environ = {
            **ALONE,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{metadata.url}/role",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": "container-token",
            "HTTP_PROXY": way.url,
        }
        ask(S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=environ)))
        assert {who(request) for request in server.seen} == {"key-7"}
        assert len(metadata.seen) == 1
        assert len(way.seen) == 3


def test_an_instance_is_asked_and_never_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    def grant(request: Seen) -> Reply:
        if request.method == "PUT":
            return Reply(body=b"metadata-token")
        if request.url.endswith("security-credentials/"):
            return Reply(body=b"role")
        return Reply(body=json.dumps({**granted(8, timedelta(hours=6)), "Code": "Success"}).encode())

    with answering(grant) as metadata, answering(reply) as server, proxy() as way:
        monkeypatch.setenv("HTTP_PROXY", way.url)
        environ = {**ALONE, "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url, "HTTP_PROXY": way.url}
        access = Access(endpoint=server.url, region="x", environ=environ)
        with pytest.raises(AccessDenied, match="no credentials"):
            ask(S3Bucket("bucket", access))
        assert metadata.seen == []
        del environ["AWS_EC2_METADATA_DISABLED"]
        ask(S3Bucket("bucket", access))
        assert {who(request) for request in server.seen} == {"key-8"}
        assert all(request.url.startswith(server.url) for request in way.seen)


def test_a_web_identity_is_changed_into_a_role(moto: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-identity")
    environ = {
        **ALONE,
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer",
        "AWS_ENDPOINT_URL_STS": moto.endpoint,
    }
    with answering(reply) as server:
        ask(S3Bucket("bucket", Access(endpoint=server.url, region="us-east-1", environ=environ)))
        assert all(who(request).startswith("ASIA") for request in server.seen)
        assert all(request.headers["x-amz-security-token"] for request in server.seen)
