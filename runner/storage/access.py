"""How to get at a store: what a job spec says about it, and the environment that credentials come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CREDENTIALS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "OBS_SECRET_ACCESS_KEY",
    "OBS_SECURITY_TOKEN",
    "HUAWEICLOUD_SDK_SK",
    "HUAWEICLOUD_SDK_SECURITY_TOKEN",
)
"""Variables whose values nobody must ever read in a log."""


@dataclass(frozen=True, slots=True)
class Access:
    """The options of one URL scheme; None where the provider's own chain is to find out. May be sent to a worker
    process, never to a log: ``environ`` holds credentials.

    addressing   path, virtual or auto
    sse          ``AES256`` or ``aws:kms``; ``kms_key`` is for the latter
    concurrency  requests at the same time
    stall        seconds without a byte after which a request has failed
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: str | None = None
    profile: str | None = None
    sse: str | None = None
    kms_key: str | None = None
    requester_pays: bool = False
    concurrency: int | None = None
    stall: float = 60.0
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
