"""What sets providers apart, as rows of a table. What no row says is as with AWS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Provider:
    """How one provider's buckets are spoken to.

    host          its endpoints; a group ``region`` says which region one is in
    region        of endpoints that name none
    virtual       the bucket stands in the host name, not in the path
    list_version  2, or 1 where buckets exist that have no ListObjectsV2
    url_encoding  keys can be listed percent-encoded
    bulk_delete   DeleteObjects exists
    """

    name: str
    host: re.Pattern[str]
    region: str = "us-east-1"
    virtual: bool = False
    list_version: int = 2
    url_encoding: bool = True
    bulk_delete: bool = True


AWS = Provider("AWS", re.compile(r"(?:^|\.)amazonaws\.com(?:\.cn)?$"), virtual=True)

# Parallel file system buckets of OBS have no V2, and with URL encoding their marker never moves.
HUAWEI = Provider("Huawei OBS", re.compile(r"^obs\.(?P<region>[\w-]+)\.myhuaweicloud\.\w+$"), virtual=True,
                  list_version=1, url_encoding=False)  # fmt: skip

GOOGLE = Provider("Google", re.compile(r"^storage\.googleapis\.com$"), region="auto", bulk_delete=False)

CLOUDFLARE = Provider("Cloudflare R2", re.compile(r"\.r2\.cloudflarestorage\.com$"), region="auto")

ALIYUN = Provider("Aliyun OSS", re.compile(r"^(?:s3\.)?oss-(?P<region>[\w-]+?)(?:-internal)?\.aliyuncs\.com$"),
                  virtual=True, bulk_delete=False)  # fmt: skip

OTHER = Provider("S3-compatible", re.compile(""))

PROVIDERS = (AWS, HUAWEI, GOOGLE, CLOUDFLARE, ALIYUN, OTHER)


def provider_of(endpoint: str | None) -> Provider:
    """The row for an endpoint; without one it is AWS."""
    if endpoint is None:
        return AWS
    host = urlsplit(endpoint).hostname or ""
    return next(provider for provider in PROVIDERS if provider.host.search(host))


def region_in(endpoint: str | None) -> str | None:
    """The region that an endpoint, or its provider's row, settles; None where AWS is to be asked."""
    provider = provider_of(endpoint)
    if endpoint is None or provider is AWS:
        return None
    found = provider.host.search(urlsplit(endpoint).hostname or "")
    return (found.groupdict().get("region") if found else None) or provider.region
