"""The proxies of an environment, as curl reads them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Proxies:
    """``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY``, and the hosts that ``NO_PROXY`` excludes: names (with all below
    them), addresses, networks, or ``*``.
    """

    by_scheme: Mapping[str, str]
    excluded: tuple[str, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Proxies:
        def value(name: str) -> str:
            return environ.get(name.lower()) or environ.get(name) or ""

        found = {scheme: value(f"{scheme.upper()}_PROXY") or value("ALL_PROXY") for scheme in ("http", "https")}
        excluded = (name.strip().lower() for name in value("NO_PROXY").split(","))
        return cls({scheme: proxy for scheme, proxy in found.items() if proxy}, tuple(filter(None, excluded)))

    def for_url(self, url: str) -> str | None:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if any(_covers(name, host, parts.port) for name in self.excluded):
            return None
        return self.by_scheme.get(parts.scheme)


def _covers(name: str, host: str, port: int | None) -> bool:
    if name in ("*", host, f"{host}:{port}"):
        return True
    if "/" in name:
        return _in_network(name, host)
    return host.endswith("." + name.lstrip("*").lstrip("."))


def _in_network(network: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
