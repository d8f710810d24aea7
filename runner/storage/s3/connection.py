"""The way to a bucket: endpoint, region, addressing, proxies, and the three clients that use them.

obstore moves bytes, botocore's client does the housekeeping, :class:`Wire` says what neither can.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.httpsession import URLLib3Session
from botocore.utils import check_dns_name
from obstore.store import S3Store

from runner.errors import CloudrunError, StoreError
from runner.storage.access import Access
from runner.storage.refusals import Asked, Operation
from runner.storage.s3.answers import ours
from runner.storage.s3.credentials import Login, configured_endpoint, make_session
from runner.storage.s3.providers import Provider, provider_of, region_in
from runner.storage.s3.proxies import Proxies
from runner.storage.s3.wire import Wire

CONNECT_S = 10
LONGEST = timedelta(hours=1)
"""What one request may take as long as bytes flow."""

FEWEST_CONNECTIONS = 64


class Connection:
    """Made without a request: what has to be asked (credentials, the region) is asked when a client is first needed."""

    def __init__(self, bucket: str, access: Access, scheme: str) -> None:
        self.bucket = bucket
        self.url = f"{scheme}://{bucket}"
        self.access = access
        self._lock = threading.RLock()
        self._ways: _Ways | None = None
        self._failure: tuple[float, CloudrunError | None] = (0.0, None)

    @property
    def provider(self) -> Provider:
        return self._way.provider

    @property
    def client(self) -> Any:
        """For the housekeeping: botocore's."""
        return self._way.client

    @property
    def objects(self) -> S3Store:
        """For bytes: obstore's."""
        return self._way.objects

    @property
    def wire(self) -> Wire:
        return self._way.wire

    def asking(self, operation: Operation, key: str = "") -> AbstractContextManager[None]:
        """Only our own errors leave the block."""
        way = self._way
        return ours(self.asked(operation, key), way.shown, lambda: self._forget(way))

    def asked(self, operation: Operation, key: str = "") -> Asked:
        return Asked(operation, self.url, key)

    @property
    def _way(self) -> _Ways:
        asked_at = time.monotonic()
        with self._lock:
            if self._ways is None:
                self._ways = self._find_once(asked_at)
            return self._ways

    def _find_once(self, asked_at: float) -> _Ways:
        """One looks for all: who has waited meanwhile gets the same answer, also when it is an error."""
        failed_at, error = self._failure
        if error is not None and failed_at >= asked_at:
            raise error
        try:
            return self._find_way()
        except CloudrunError as error:
            self._failure = time.monotonic(), error
            raise

    def _find_way(self) -> _Ways:
        with ours(self.asked("list"), self.access.endpoint or "AWS", lambda: None):
            return _Ways(self.bucket, self.access)

    def _forget(self, way: _Ways) -> None:
        """The store calls the credentials of ``way`` expired: the next request looks for them anew. The many that
        fail at the same time make one new way.
        """
        with self._lock:
            if self._ways is way:
                self._ways = None


class _Ways:
    """All that hangs on one look at the settings and credentials."""

    def __init__(self, bucket: str, access: Access) -> None:
        self._bucket = bucket
        self._access = access
        self._session = make_session(access)
        self._login = Login(access, self._session)
        self._endpoint = access.endpoint or configured_endpoint(self._session, access.environ, "s3")
        if self._endpoint and not self._endpoint.startswith(("http://", "https://")):
            raise StoreError(f"{self._endpoint} is no endpoint", "it begins with https:// or http://")
        self.provider = provider_of(self._endpoint)
        self._proxies = Proxies.of(access.environ)
        self._connections = max(FEWEST_CONNECTIONS, access.concurrency or 0)
        self._virtual = _is_virtual(access.addressing, self.provider, bucket)
        self._login.get_frozen_credentials()
        self._region = self._find_region()
        self.client = self._make_client(self._region)
        self.shown = _without_secrets(self.client.meta.endpoint_url)
        self.objects = self._make_objects()
        self.wire = self._make_wire()

    @property
    def _base(self) -> str:
        """The bucket's URL."""
        endpoint = self.client.meta.endpoint_url.rstrip("/")
        if not self._virtual:
            return f"{endpoint}/{self._bucket}"
        scheme, _, rest = endpoint.partition("://")
        return f"{scheme}://{self._bucket}.{rest}"

    @property
    def _certificates(self) -> str | None:
        """A file of certificates to trust, where the environment or the profile names one."""
        found: str | None = self._session.get_config_variable("ca_bundle")
        return found or self._access.environ.get("SSL_CERT_FILE")

    def _proxies_to(self, url: str) -> dict[str, str]:
        """In botocore's words. Empty means none; botocore takes nothing else for that."""
        proxy = self._proxies.for_url(url)
        return {urlsplit(url).scheme: proxy} if proxy else {}

    def _find_region(self) -> str:
        access = self._access
        known: str | None = access.region or access.environ.get("AWS_REGION")
        known = known or self._session.get_config_variable("region") or region_in(self._endpoint)
        return known or region_of(self._make_client("us-east-1"), self._bucket)

    def _make_client(self, region: str) -> Any:
        config = Config(
            s3={"addressing_style": "virtual" if self._virtual else "path"},
            signature_version="s3v4",
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=self._connections,
            connect_timeout=CONNECT_S,
            read_timeout=self._access.stall,
            # Strict stores refuse the checksums that botocore adds of its own accord; bodies are signed anyway.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            ignore_configured_endpoint_urls=True,
            proxies=self._proxies_to(self._endpoint or "https://s3.amazonaws.com"),
        )
        return self._session.create_client(
            "s3", region_name=region, endpoint_url=self._endpoint, verify=self._certificates, config=config
        )

    def _make_objects(self) -> S3Store:
        """What obstore is not told it takes from the environment of the process: so it is told everything."""
        endpoint = self._base if self._virtual else self.client.meta.endpoint_url.rstrip("/")
        return S3Store(
            self._bucket,
            endpoint=endpoint,
            aws_endpoint_url_s3=endpoint,
            region=self._region,
            virtual_hosted_style_request=self._virtual,
            conditional_put="etag",
            request_payer=self._access.requester_pays,
            skip_signature=False,
            unsigned_payload=False,
            credential_provider=self._login,
            client_options=self._http(endpoint),
            retry_config={"max_retries": 0},
            **_encryption(self._access),
        )

    def _http(self, endpoint: str) -> Any:
        options: dict[str, Any] = {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=self._access.stall),
            "timeout": LONGEST,
            "pool_max_idle_per_host": str(self._connections),
        }
        proxy = self._proxies.for_url(endpoint)
        # A proxy that is used for nothing keeps it from those that this process's environment names.
        unused = {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": urlsplit(endpoint).hostname}
        options |= {"proxy_url": proxy} if proxy else unused
        if self._certificates:
            options["root_certificate"] = _read(self._certificates)
        return options

    def _make_wire(self) -> Wire:
        pool = URLLib3Session(
            verify=self._certificates or True,
            proxies=self._proxies_to(self._base),
            timeout=(CONNECT_S, self._access.stall),
            max_pool_connections=self._connections,
        )
        headers = {"x-amz-request-payer": "requester"} if self._access.requester_pays else {}
        return Wire(self._base, self._region, self._login, pool, headers)


def _read(certificates: str) -> bytes:
    try:
        return Path(certificates).read_bytes()
    except OSError as error:
        raise StoreError(
            f"cannot read the certificates in {certificates}: {error.strerror}",
            "AWS_CA_BUNDLE, SSL_CERT_FILE or the profile's ca_bundle names that file",
        ) from error


def _is_virtual(addressing: str | None, provider: Provider, bucket: str) -> bool:
    """Whether the bucket stands in the host name. One with dots does not fit any certificate."""
    if addressing in ("path", "virtual"):
        return addressing == "virtual"
    return provider.virtual and "." not in bucket and bool(check_dns_name(bucket))


def region_of(client: Any, bucket: str) -> str:
    """What AWS says: in its answer, also when that is a refusal."""
    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region", "us-east-1"))


def _encryption(access: Access) -> Any:
    options: dict[str, Any] = {"server_side_encryption": access.sse} if access.sse else {}
    return options | ({"sse_kms_key_id": access.kms_key} if access.kms_key else {})


def _without_secrets(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
