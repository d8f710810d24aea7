"""Who we are: one chain of credentials for all clients of a bucket, renewed while a job runs.

The chain is botocore's: environment, profile, SSO, web identity, container, instance role. It reads ``Access.environ``,
not this process's environment.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from botocore.configprovider import (
    BOTOCORE_DEFAUT_SESSION_VARIABLES,
    ConfigChainFactory,
    ConfiguredEndpointProvider,
)
from botocore.credentials import (
    AssumeRoleWithWebIdentityProvider,
    ContainerProvider,
    CredentialResolver,
    Credentials,
    EnvProvider,
    InstanceMetadataProvider,
    create_credential_resolver,
)
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    MetadataRetrievalError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.httpsession import URLLib3Session
from botocore.session import Session
from botocore.utils import InstanceMetadataFetcher, resolve_imds_endpoint_mode

from runner.errors import AccessDenied, CredentialsExpired, StoreUnreachable
from runner.storage.access import Access
from runner.storage.s3.settings import Settings

if TYPE_CHECKING:
    from obstore.store import S3Credential

ASK_AGAIN = timedelta(seconds=60)
"""How long obstore may use a temporary token before it asks us again. Asking is cheap: botocore keeps the token."""

SOURCES = {
    "env": "the environment",
    "shared-credentials-file": "{profile}",
    "config-file": "{profile}",
    "custom-process": "the credential_process of {profile}",
    "sso": "the SSO login of {profile}",
    "login": "the login of {profile}",
    "assume-role": "the role of {profile}",
    "assume-role-with-web-identity": "a web identity",
    "container-role": "the container role",
    "iam-role": "the instance role of this machine",
}
"""botocore's names for where it found credentials, in words."""

HOW_TO = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `storage.profile`, or give the machine a role; "
    "`aws sts get-caller-identity` shows what it has"
)


def make_session(access: Access) -> Session:
    """A botocore session that takes its settings from ``access``."""
    session = Session(profile=access.profile)
    chains = ConfigChainFactory(session=session, environ=access.environ)
    settings = session.get_component("config_store")
    for name, (key, variable, default, convert) in BOTOCORE_DEFAUT_SESSION_VARIABLES.items():
        chain = chains.create_config_chain(
            instance_name=name,
            env_var_names=variable,
            config_property_names=key,
            default=default,
            conversion_func=convert,
        )
        settings.set_config_provider(name, chain)
    return session


def chain_settings(access: Access) -> Settings:
    """All that botocore finds: in ``access``, its environment, the profile. Asks no server yet."""
    session = make_session(access)
    certificates: str | None = session.get_config_variable("ca_bundle")
    region: str | None = access.region or access.environ.get("AWS_REGION") or session.get_config_variable("region")
    return Settings(
        endpoint=access.endpoint or configured_endpoint(session, access.environ, "s3"),
        region=region,
        certificates=certificates or access.environ.get("SSL_CERT_FILE"),
        login=ChainLogin(access, session),
    )


def configured_endpoint(session: Session, environ: Mapping[str, str], service: str) -> str | None:
    """``AWS_ENDPOINT_URL_<SERVICE>`` or ``AWS_ENDPOINT_URL``, from the environment or the profile."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    provider = ConfiguredEndpointProvider(
        full_config=session.full_config,
        scoped_config=session.get_scoped_config(),
        client_name=service,
        environ=environ,
    )
    found: str | None = provider.provide()
    return found


class ChainLogin(Credentials):  # type: ignore[misc]
    """The credentials of a bucket, as botocore's and obstore's clients ask for them, request by request.

    :meth:`drop` makes the next request look for them anew, at their source: for tokens that a store calls expired
    although they should still be good, and for sources that have been renewed from outside.
    """

    def __init__(self, access: Access, session: Session) -> None:
        self.session = session
        self._access = access
        self._lock = threading.Lock()
        self._found: Credentials | None = None
        session.register_component("credential_provider", self)

    def load_credentials(self) -> ChainLogin:
        """Ourselves, for clients that the session makes."""
        return self

    @property
    def source(self) -> str:
        """Where the credentials came from, for people; empty while nobody has looked."""
        found = self._found
        if found is None:
            return ""
        name = self.session.get_config_variable("profile") or "default"
        return SOURCES.get(found.method, found.method or "").format(profile=f"profile {name}")

    def get_frozen_credentials(self) -> Any:
        """Key, secret and token that are good now. AccessDenied when there are none."""
        try:
            return self._current().get_frozen_credentials()
        except (BotoCoreError, ClientError, RuntimeError, ValueError) as error:
            # The last two are what botocore says of a source that gives expired tokens, or no JSON.
            raise _refused(error) from None

    def get_deferred_property(self, property_name: str) -> Any:
        """Account ids do not matter to S3 and are not looked up."""
        return lambda: None

    def __call__(self) -> S3Credential:
        """The same, in obstore's words."""
        now = self.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + ASK_AGAIN if now.token else None,
        }

    def drop(self) -> None:
        with self._lock:
            self._found = None

    def _current(self) -> Credentials:
        with self._lock:
            if self._found is None:
                self._found = _chain(self.session, self._access).load_credentials()
            if self._found is None:
                raise AccessDenied("no credentials for S3", HOW_TO)
            return self._found


_WRONG_SETTINGS = (PartialCredentialsError, ProfileNotFound, InvalidConfigError, ConfigParseError, ConfigNotFound)


_NOT_ALLOWED = ("AccessDenied", "ForbiddenException", "UnauthorizedException")


def _refused(error: Exception) -> AccessDenied | StoreUnreachable:
    """Why a source gave no credentials. Sources that may come right are asked again."""
    if isinstance(error, UnauthorizedSSOTokenError | SSOError | TokenRetrievalError):
        return AccessDenied(f"no credentials for S3: {error}", "log in again: aws sso login")
    if isinstance(error, _WRONG_SETTINGS):
        return AccessDenied(f"no credentials for S3: {error}", "set both key and secret, or mend the profile")
    if isinstance(error, ValueError):
        return AccessDenied(f"no credentials for S3: their source gives no JSON ({error})", "mend credential_process")
    if isinstance(error, MetadataRetrievalError):
        return StoreUnreachable(f"no credentials for S3: {error}", "the machine's metadata service does not answer")
    if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") in _NOT_ALLOWED:
        return AccessDenied(f"no credentials for S3: {error}", "the role, or the account, is not yours to use")
    return CredentialsExpired(f"no credentials for S3: {error}", "renew them where they come from, or log in again")


def _chain(session: Session, access: Access) -> CredentialResolver:
    """The chain of botocore with those links replaced that would read this process's environment, or use a proxy."""
    resolver = create_credential_resolver(session)
    ours = [
        EnvProvider(environ=access.environ),
        _web_identity(session, access),
        ContainerProvider(environ=access.environ),
        InstanceMetadataProvider(iam_role_fetcher=_Instance(session, access.environ)),
    ]
    links = {link.METHOD: link for link in ours}
    # The two links of EC2's and boto's early days read files that only os.environ names.
    old = ("ec2-credentials-file", "boto-config")
    kept = [links.get(link.METHOD, link) for link in resolver.providers if link.METHOD not in old]
    return CredentialResolver(providers=kept)


def _web_identity(session: Session, access: Access) -> AssumeRoleWithWebIdentityProvider:
    name = session.get_config_variable("profile") or "default"
    keys = ("web_identity_token_file", "role_session_name", "role_arn")
    given = {key: access.environ[f"AWS_{key.upper()}"] for key in keys if f"AWS_{key.upper()}" in access.environ}
    own = {} if access.profile else given
    profile = {**session.full_config.get("profiles", {}).get(name, {}), **own}

    def create(service: str, **options: Any) -> Any:
        endpoint = configured_endpoint(session, access.environ, service)
        return session.create_client(service, region_name=_region(session, access), endpoint_url=endpoint, **options)

    return AssumeRoleWithWebIdentityProvider(
        load_config=lambda: {"profiles": {name: profile}},
        client_creator=create,
        profile_name=name,
        disable_env_vars=True,
    )


def _region(session: Session, access: Access) -> str:
    region: str | None = access.region or access.environ.get("AWS_REGION") or session.get_config_variable("region")
    return region or "us-east-1"


class _Instance(InstanceMetadataFetcher):  # type: ignore[misc]
    """The machine's own metadata service, which no proxy may stand before."""

    def __init__(self, session: Session, environ: Mapping[str, str]) -> None:
        timeout = session.get_config_variable("metadata_service_timeout")
        super().__init__(
            timeout=timeout,
            num_attempts=session.get_config_variable("metadata_service_num_attempts"),
            env=dict(environ),
            user_agent=session.user_agent(),
            config={
                "ec2_metadata_service_endpoint": session.get_config_variable("ec2_metadata_service_endpoint"),
                "ec2_metadata_service_endpoint_mode": resolve_imds_endpoint_mode(session),
                "ec2_credential_refresh_window": 15 * 60,
                "ec2_metadata_v1_disabled": session.get_config_variable("ec2_metadata_v1_disabled"),
            },
        )
        self._session = URLLib3Session(timeout=timeout)
