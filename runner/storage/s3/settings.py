"""What the clients of a bucket have to know before the first request: endpoint, region, certificates, who we are.

botocore knows where to look for it. Where the environment says all of it there is nothing to look for, and botocore is
not loaded: that takes a tenth of a second, in each process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from runner.storage.access import Access

if TYPE_CHECKING:
    from obstore.store import S3Credential


CONNECT_S = 10
"""Seconds within which a connection is made, or fails, by any of the clients."""


class Keys(NamedTuple):
    """Credentials, by botocore's names."""

    access_key: str
    secret_key: str
    token: str | None


class Login(Protocol):
    """The credentials of a bucket. Both calls raise AccessDenied when there are none."""

    @property
    def source(self) -> str:
        """Where they came from, for people; empty while nobody has looked."""

    def get_frozen_credentials(self) -> Keys:
        """Those that are good now, for botocore's signer."""

    def __call__(self) -> S3Credential:
        """The same, for obstore."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``region`` is None where AWS is to be asked; ``certificates`` is a file of certificates to trust."""

    endpoint: str | None
    region: str | None
    certificates: str | None
    login: Login


@dataclass(frozen=True, slots=True)
class EnvironmentLogin:
    """Keys that stand in the environment and do not change."""

    keys: Keys
    source: str = "the environment"

    def get_frozen_credentials(self) -> Keys:
        return self.keys

    def __call__(self) -> S3Credential:
        access, secret, token = self.keys
        return {"access_key_id": access, "secret_access_key": secret, "token": token, "expires_at": None}


def settings_of(access: Access) -> Settings:
    """One look at the settings and credentials. Raises AccessDenied, or botocore's errors for wrong settings."""
    if access.profile is None and environment_says_all(access.environ):
        return _in_environment(access)
    # Loaded here, since many need none of it: see above.
    from runner.storage.s3.credentials import chain_settings  # noqa: PLC0415

    return chain_settings(access)


# Each of these sends botocore to a file, or to a rule of its own.
_ASKS_BOTOCORE = (
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_CREDENTIAL_EXPIRATION",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
)
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def environment_says_all(environ: Mapping[str, str]) -> bool:
    """True where botocore's chain would end at its first link, and no file of settings adds to it."""
    if any(environ.get(name) for name in _ASKS_BOTOCORE):
        return False
    if any(os.path.exists(os.path.expanduser(environ.get(name) or usual)) for name, usual in _FILES.items()):
        return False
    return bool(environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"))


def _in_environment(access: Access) -> Settings:
    environ = access.environ
    token = environ.get("AWS_SESSION_TOKEN") or environ.get("AWS_SECURITY_TOKEN") or None
    return Settings(
        endpoint=access.endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
        region=access.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None,
        certificates=environ.get("AWS_CA_BUNDLE") or environ.get("SSL_CERT_FILE") or None,
        login=EnvironmentLogin(Keys(environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], token)),
    )
