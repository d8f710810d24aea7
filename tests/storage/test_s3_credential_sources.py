"""An error about access says where the credentials came from, and never what they are."""

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
from tests.servers.web import Reply, Seen, answering

ALONE = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
UNKNOWN = b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist.</Message></Error>"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
SECRET = "hunter22-of-the-key"  # opens nothing

REQUESTS: dict[str, Callable[[S3Bucket], object]] = {
    "list": lambda bucket: bucket.page("", None),
    "get": lambda bucket: bucket.get("key").__enter__(),
    "put": lambda bucket: bucket.put("key", b"x"),
    "begin": lambda bucket: bucket.begin("key"),
}


def granted() -> dict[str, Any]:
    ends = (datetime.now(UTC) + timedelta(hours=6)).isoformat()
    keys = {"AccessKeyId": "key", "SecretAccessKey": SECRET, "SessionToken": "session-token", "Token": "session-token"}
    return {"Version": 1, "Code": "Success", **keys, "Expiration": ends}


def refused(bucket: S3Bucket, request: str) -> str:
    with pytest.raises((AccessDenied, CredentialsExpired)) as caught:
        REQUESTS[request](bucket)
    said = f"{caught.value.message} {caught.value.hint}"
    assert SECRET not in said
    assert "session-token" not in said
    return said


def said_of(environ: dict[str, str], *, profile: str | None = None, body: bytes = DENIED, request: str = "list") -> str:
    with answering(lambda _: Reply(403, body)) as server:
        return refused(
            S3Bucket("bucket", Access(endpoint=server.url, region="x", profile=profile, environ=environ)), request
        )


def in_environment() -> dict[str, str]:
    return {**ALONE, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("body", [DENIED, UNKNOWN, EXPIRED], ids=["denied", "unknown", "expired"])
def test_the_environment(body: bytes, request_: str) -> None:
    assert "from the environment" in said_of(in_environment(), body=body, request=request_)


def test_the_environment_although_there_are_files(tmp_path: Path) -> None:
    """Files of settings make botocore's chain answer, not the quick look."""
    (tmp_path / "config").write_text("[default]\nregion = x\n")
    environ = {**in_environment(), "AWS_CONFIG_FILE": str(tmp_path / "config")}
    assert "from the environment" in said_of(environ)


def test_it_is_said_once_however_many_blocks_the_error_leaves() -> None:
    def refuse_the_head(request: Seen) -> Reply:
        headers = {"ETag": f'"{"a" * 32}"', "Last-Modified": "Mon, 30 Nov 2026 19:42:37 GMT"}
        whole = request.method == "GET" and "range" not in request.headers
        return Reply(200, b"x", headers=headers) if whole else Reply(403, DENIED)

    with answering(refuse_the_head) as server:
        said = refused(S3Bucket("bucket", Access(endpoint=server.url, region="x", environ=in_environment())), "get")
    assert said.count("(they came from the environment)") == 1


@pytest.mark.parametrize("file", ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
@pytest.mark.parametrize("named_by", ["the spec", "AWS_PROFILE", "nothing"])
def test_a_profile(tmp_path: Path, file: str, named_by: str) -> None:
    name = "default" if named_by == "nothing" else "mine"
    head = f"profile {name}" if file == "AWS_CONFIG_FILE" and name != "default" else name
    (tmp_path / "file").write_text(f"[{head}]\naws_access_key_id = key\naws_secret_access_key = {SECRET}\n")
    environ = {**ALONE, file: str(tmp_path / "file")} | ({"AWS_PROFILE": name} if named_by == "AWS_PROFILE" else {})
    said = said_of(environ, profile=name if named_by == "the spec" else None)
    assert f"profile {name}" in said


def test_a_program(tmp_path: Path) -> None:
    program = tmp_path / "login.py"
    program.write_text(f"print({json.dumps(granted())!r})\n")
    (tmp_path / "config").write_text(f"[profile mine]\ncredential_process = {sys.executable} {program}\n")
    said = said_of({**ALONE, "AWS_CONFIG_FILE": str(tmp_path / "config")}, profile="mine")
    assert "credential_process" in said
    assert "profile mine" in said


def test_a_container() -> None:
    with answering(lambda _: Reply(body=json.dumps(granted()).encode())) as metadata:
        environ = {**ALONE, "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{metadata.url}/role"}
        environ["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "container-token"
        said = said_of(environ)
    assert "container role" in said
    assert "container-token" not in said


def test_an_instance() -> None:
    def grant(request: Seen) -> Reply:
        if request.method == "PUT":
            return Reply(body=b"metadata-token")
        if request.url.endswith("security-credentials/"):
            return Reply(body=b"role-of-the-machine")
        return Reply(body=json.dumps(granted()).encode())

    with answering(grant) as metadata:
        environ = {**ALONE, "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
        del environ["AWS_EC2_METADATA_DISABLED"]
        assert "instance role" in said_of(environ)


def test_a_web_identity(moto: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-identity")
    environ = {
        **ALONE,
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer",
        "AWS_ENDPOINT_URL_STS": moto.endpoint,
    }
    said = said_of(environ)
    assert "web identity" in said
    assert "the-identity" not in said
