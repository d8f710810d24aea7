"""Where a bucket of OBS is asked, and in which style."""

from __future__ import annotations

import ipaddress
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from runner.errors import StoreError
from runner.storage.access import Access

_REGION = re.compile(r"obs\.([a-z0-9-]+)\.myhuaweicloud\.[a-z.]+")


@dataclass(frozen=True, slots=True)
class Proxy:
    """What forwards our connections; may hold a password."""

    host: str
    port: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``url`` without the bucket. ``virtual``: the bucket is part of the host's name, else of the path.

    region  empty when nobody said it
    """

    url: str
    virtual: bool
    region: str = ""
    proxy: Proxy | None = None


def endpoint_of(bucket: str, access: Access) -> Endpoint:
    """Raises StoreError when nothing says where the bucket is."""
    region = access.region or access.environ.get("OBS_REGION") or ""
    url = access.endpoint or access.environ.get("OBS_ENDPOINT") or _of_region(region)
    if not url:
        raise StoreError(
            f"obs://{bucket}: where it is, is not known",
            "set `storage.endpoint` or `storage.region` (or OBS_ENDPOINT, OBS_REGION)",
        )
    if "://" not in url:
        url = f"https://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or ":" in parts.hostname:
        raise StoreError(f"bad endpoint {url!r}", "an endpoint reads like https://obs.cn-north-4.myhuaweicloud.com")
    told = _REGION.fullmatch(parts.hostname)
    return Endpoint(
        url.rstrip("/"),
        _is_virtual(bucket, parts.scheme, parts.hostname, access.addressing),
        region or (told.group(1) if told else ""),
        _proxy_for(parts.scheme, parts.hostname, access.environ),
    )


def _of_region(region: str) -> str:
    return f"https://obs.{region}.myhuaweicloud.com" if region else ""


def _is_virtual(bucket: str, scheme: str, host: str, addressing: str | None) -> bool:
    if host == "localhost" or _is_address(host):
        return False
    if addressing in ("path", "virtual"):
        return addressing == "virtual"
    # A certificate for *.host covers no further dots.
    return not (scheme == "https" and "." in bucket)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _proxy_for(scheme: str, host: str, environ: Mapping[str, str]) -> Proxy | None:
    def told(name: str) -> str:
        return environ.get(name) or environ.get(name.upper()) or ""

    url = told(f"{scheme}_proxy")
    if not url or urllib.request.proxy_bypass_environment(host, {"no": told("no_proxy")}):  # type: ignore[attr-defined]
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if not parts.hostname:
        raise StoreError(f"{scheme}_proxy names no host")
    user, password = (unquote(text) if text is not None else None for text in (parts.username, parts.password))
    return Proxy(parts.hostname, parts.port or 80, user, password)
