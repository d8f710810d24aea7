"""What opens OBS: keys from the environment, or those that an ECS machine's agency gives it, renewed in time."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

from runner.clock import Clock, SystemClock
from runner.errors import AccessDenied, StoreUnreachable

METADATA = "http://169.254.169.254"
"""Where an ECS machine asks about itself."""

VARIABLES = (
    ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN"),
    ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN"),
)
"""Names of key, secret and token, in the order in which they are looked for."""

MARGIN = 600.0
"""Seconds before they run out in which keys are renewed."""

LOOK_AGAIN_AFTER = 30.0
"""Seconds between two looks at the machine's keys: it may have no newer ones yet."""

ANSWERS_WITHIN = 3.0
"""Seconds. Elsewhere than on an ECS nobody listens at that address."""

_SESSION_SECONDS = "21600"
_NO_TOKENS = (404, 405, 503)


@dataclass(frozen=True, slots=True)
class Keys:
    """An access key with its secret; with a token and an end (epoch seconds) where it is temporary."""

    access: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires: float = math.inf


class Credentials:
    """Keys that are good now. Safe to use from many threads."""

    def __init__(self, environ: Mapping[str, str], *, metadata: str = METADATA, clock: Clock | None = None) -> None:
        self._environ = environ
        self._metadata = urlsplit(metadata)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._keys: Keys | None = None
        self._look_again = -math.inf

    def keys(self) -> Keys:
        """Raises AccessDenied when there are none, StoreUnreachable when they cannot be had just now."""
        with self._lock:
            now = self._clock.now()
            if self._keys is None or (self._keys.expires - now < MARGIN and now >= self._look_again):
                self._keys = self._find(now)
            return self._keys

    def renewed(self, refused: Keys) -> bool:
        """Look again, because the store refuses ``refused``; True when there are other keys now."""
        with self._lock:
            now = self._clock.now()
            if self._keys == refused and now >= self._look_again:
                self._keys = self._find(now)
            return self._keys != refused

    def _find(self, now: float) -> Keys:
        for access, secret, token in VARIABLES:
            if self._environ.get(access) and self._environ.get(secret):
                return Keys(self._environ[access], self._environ[secret], self._environ.get(token) or None)
        self._look_again = now + LOOK_AGAIN_AFTER
        try:
            found = self._from_machine()
        except StoreUnreachable:
            if self._keys is None or self._keys.expires <= now:
                raise
            return self._keys
        if found is None:
            raise _none_found()
        return found

    def _from_machine(self) -> Keys | None:
        """None where there is no such service, or the machine has no agency."""
        try:
            headers = self._session_headers()
            status, body = self._ask("GET", "/openstack/latest/securitykey", headers)
        except (OSError, http.client.HTTPException) as error:
            if self._keys is None:
                return None
            raise StoreUnreachable(f"the machine's metadata service does not answer: {type(error).__name__}") from None
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        if status != http.HTTPStatus.OK:
            raise StoreUnreachable(f"the machine's metadata service answers {status} instead of keys")
        return _keys_in(body)

    def _session_headers(self) -> dict[str, str]:
        """Machines may insist on a session's token. Huawei's SDKs do not agree on the header's name: both are sent."""
        names = ("X-Metadata-Token", "X-securitykey-Token")
        status, body = self._ask(
            "PUT", "/meta-data/latest/api/token", {f"{name}-Ttl-Seconds": _SESSION_SECONDS for name in names}
        )
        token = body.decode("latin-1").strip()
        if status in _NO_TOKENS or not token:
            return {}
        if status != http.HTTPStatus.OK:
            raise StoreUnreachable(f"the machine's metadata service answers {status} instead of a token")
        return dict.fromkeys(names, token)

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        # http.client knows no proxies: these keys must not go through one.
        host = self._metadata.hostname or ""
        connection = http.client.HTTPConnection(host, self._metadata.port, timeout=ANSWERS_WITHIN)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _keys_in(body: bytes) -> Keys:
    # The body holds a secret: no error may quote it.
    try:
        told = json.loads(body)["credential"]
        expires = datetime.fromisoformat(told["expires_at"])
        return Keys(str(told["access"]), str(told["secret"]), str(told["securitytoken"]), _as_utc(expires).timestamp())
    except (ValueError, KeyError, TypeError):
        raise StoreUnreachable("the machine's metadata service answers something that is no keys") from None


def _as_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _none_found() -> AccessDenied:
    key, secret, _ = VARIABLES[0]
    return AccessDenied(
        "no credentials for OBS",
        f"set {key} and {secret} (and OBS_SECURITY_TOKEN for temporary ones), or give the machine an agency",
    )
