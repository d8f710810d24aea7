"""The way to a bucket: endpoint, region, addressing, proxies, and the three clients that use them.

obstore moves bytes, botocore's client does the housekeeping, :class:`Wire` says what neither can. Each is made, and
loaded, when it is first needed: a process that only fetches needs nothing of botocore.
"""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.store import S3Store

from runner.errors import CloudrunError, StoreError
from runner.storage.access import Access
from runner.storage.refusals import Asked, Operation
from runner.storage.s3.answers import Asking
from runner.storage.s3.providers import Provider, provider_of, region_in
from runner.storage.s3.proxies import Proxies
from runner.storage.s3.settings import CONNECT_S, settings_of

if TYPE_CHECKING:
    from runner.storage.s3.wire import Wire

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
        with self._lock:
            return self._way.client

    @property
    def objects(self) -> S3Store:
        """For bytes: obstore's."""
        with self._lock:
            return self._way.objects

    @property
    def wire(self) -> Wire:
        with self._lock:
            return self._way.wire

    def asking(self, operation: Operation, key: str = "") -> Asking:
        """Only our own errors leave the block."""
        way = self._way
        return Asking(self.asked(operation, key), way.shown, lambda: self._forget(way), way.source)

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
        with Asking(self.asked("list"), self.access.endpoint or "AWS", lambda: None, str):
            return _Ways(self.bucket, self.access)

    def _forget(self, way: _Ways) -> None:
        """The store calls the credentials of ``way`` expired: the next request looks for them anew. The many that
        fail at the same time make one new way.
        """
        with self._lock:
            if self._ways is way:
                self._ways = None


class _Ways:
    """All that hangs on one look at the settings and credentials. Used by one thread at a time."""

    def __init__(self, bucket: str, access: Access) -> None:
        self._bucket = bucket
        self._access = access
        self._settings = settings_of(access)
        self._endpoint = self._settings.endpoint
        if self._endpoint and not self._endpoint.startswith(("http://", "https://")):
            raise StoreError(f"{self._endpoint} is no endpoint", "it begins with https:// or http://")
        self.provider = provider_of(self._endpoint)
        self._proxies = Proxies.of(access.environ)
        self._connections = max(FEWEST_CONNECTIONS, access.concurrency or 0)
        self._virtual = _is_virtual(access.addressing, self.provider, bucket)
        self._settings.login.get_frozen_credentials()
        self._region = self._settings.region or region_in(self._endpoint) or self._ask_region()
        # AWS's own endpoint is botocore's to know.
        self._base = (self._endpoint or self.client.meta.endpoint_url).rstrip("/")
        self.shown = _without_secrets(self._base)

    def source(self) -> str:
        """Where the credentials came from."""
        return self._settings.login.source

    @property
    def _url(self) -> str:
        """The bucket's."""
        if not self._virtual:
            return f"{self._base}/{self._bucket}"
        scheme, _, rest = self._base.partition("://")
        return f"{scheme}://{self._bucket}.{rest}"

    def _proxies_to(self, url: str) -> dict[str, str]:
        """In botocore's words. Empty means none; botocore takes nothing else for that."""
        proxy = self._proxies.for_url(url)
        return {urlsplit(url).scheme: proxy} if proxy else {}

    def _ask_region(self) -> str:
        from runner.storage.s3.housekeeping import region_of  # noqa: PLC0415 - loaded when needed: see above

        return region_of(self._make_client("us-east-1"), self._bucket)

    @cached_property
    def client(self) -> Any:
        return self._make_client(self._region)

    def _make_client(self, region: str) -> Any:
        from runner.storage.s3.housekeeping import make_client  # noqa: PLC0415 - loaded when needed: see above

        return make_client(
            self._access,
            self._settings,
            region,
            virtual=self._virtual,
            connections=self._connections,
            proxies=self._proxies_to(self._endpoint or "https://s3.amazonaws.com"),
        )

    @cached_property
    def objects(self) -> S3Store:
        """What obstore is not told it takes from the environment of the process: so it is told everything."""
        endpoint = self._url if self._virtual else self._base
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
            credential_provider=self._settings.login,
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
        if self._settings.certificates:
            options["root_certificate"] = _read(self._settings.certificates)
        return options

    @cached_property
    def wire(self) -> Wire:
        from runner.storage.s3.wire import Wire, pool_of  # noqa: PLC0415 - loaded when needed: see above

        timeout = (CONNECT_S, self._access.stall)
        pool = pool_of(self._settings.certificates, self._proxies_to(self._url), timeout, self._connections)
        headers = {"x-amz-request-payer": "requester"} if self._access.requester_pays else {}
        return Wire(self._url, self._region, self._settings.login, pool, headers)


def _read(certificates: str) -> bytes:
    try:
        return Path(certificates).read_bytes()
    except OSError as error:
        raise StoreError(
            f"cannot read the certificates in {certificates}: {error.strerror}",
            "AWS_CA_BUNDLE, SSL_CERT_FILE or the profile's ca_bundle names that file",
        ) from error


_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{1,61}[a-z0-9])")


def _is_virtual(addressing: str | None, provider: Provider, bucket: str) -> bool:
    """Whether the bucket stands in the host name. One with dots does not fit any certificate."""
    if addressing in ("path", "virtual"):
        return addressing == "virtual"
    return provider.virtual and _LABEL.fullmatch(bucket) is not None


def _encryption(access: Access) -> Any:
    options: dict[str, Any] = {"server_side_encryption": access.sse} if access.sse else {}
    return options | ({"sse_kms_key_id": access.kms_key} if access.kms_key else {})


def _without_secrets(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
