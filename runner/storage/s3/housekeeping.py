"""botocore's client for one bucket: for all that is neither bytes nor a listing."""

from __future__ import annotations

from typing import Any

from botocore.config import Config
from botocore.exceptions import ClientError

from runner.storage.access import Access
from runner.storage.s3.credentials import ChainLogin, make_session
from runner.storage.s3.settings import CONNECT_S, Settings


def make_client(
    access: Access, settings: Settings, region: str, *, virtual: bool, connections: int, proxies: dict[str, str]
) -> Any:
    """One try for each request, with the settings and credentials that the bucket's other clients have."""
    config = Config(
        s3={"addressing_style": "virtual" if virtual else "path"},
        signature_version="s3v4",
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=connections,
        connect_timeout=CONNECT_S,
        read_timeout=access.stall,
        # Strict stores refuse the checksums that botocore adds of its own accord; bodies are signed anyway.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        ignore_configured_endpoint_urls=True,
        proxies=proxies,
    )
    login = settings.login
    # Where the environment said all, the chain ends at its first link: the same keys.
    chain = login if isinstance(login, ChainLogin) else ChainLogin(access, make_session(access))
    return chain.session.create_client(
        "s3", region_name=region, endpoint_url=settings.endpoint, verify=settings.certificates, config=config
    )


def region_of(client: Any, bucket: str) -> str:
    """What AWS says: in its answer, also when that is a refusal."""
    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region", "us-east-1"))
