"""From a job spec to what it names: stores, sources, the cache, this machine's places. Needs no supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.checkpoint.layout import LocalLayout, StoreLayout, state_dir
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.spec import Data, JobSpec, usual_cache_dir
from runner.storage.access import Access
from runner.storage.api import ObjectStore
from runner.storage.folder import FolderStore
from runner.storage.opening import Opening
from runner.storage.retrying import Retry

STORE_PATIENCE = 60.0
# A person waits for the answer.
PATIENCE_OF_A_LOOK = 4.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job as this machine sees it: its spec, its store (``opening`` is how to get at it), its places."""

    spec: JobSpec
    environ: Mapping[str, str]
    opening: Opening
    store: ObjectStore
    local: LocalLayout

    @property
    def keys(self) -> StoreLayout:
        return StoreLayout(self.spec.name)


def open_job(spec: JobSpec, environ: Mapping[str, str]) -> Job:
    url = spec.store_url(environ)
    local = LocalLayout(state_dir(environ), spec.cache_dir(environ), spec.name, url)
    opening = Opening(url, access_of(spec, url, environ))
    return Job(spec, environ, opening, opening(Retry(PATIENCE_OF_A_LOOK)), local)


def access_of(spec: JobSpec, url: str, environ: Mapping[str, str]) -> Access:
    """What the spec says about stores of the URL's scheme."""
    options = spec.storage.for_scheme(url.partition("://")[0])
    return Access(
        endpoint=options.endpoint,
        region=options.region,
        addressing=options.addressing,
        profile=options.profile,
        sse=options.sse,
        kms_key=options.kms_key,
        requester_pays=options.requester_pays,
        concurrency=options.concurrency,
        environ=dict(environ),
    )


def open_recorded(url: str, told: Mapping[str, Any], environ: Mapping[str, str]) -> ObjectStore:
    """The store of a job that this machine has a record of: see :func:`describe`."""
    return Opening(url, replace(Access(**told), environ=environ))(Retry(PATIENCE_OF_A_LOOK))


def open_cache(spec: JobSpec, environ: Mapping[str, str]) -> DataCache:
    folder, limit = spec.cache_dir(environ), spec.cache.limit
    return DataCache(folder, limit if isinstance(limit, int) else share_of_disk(folder, limit))


def open_cache_of_user(environ: Mapping[str, str]) -> DataCache:
    """The cache of jobs whose spec names none."""
    return DataCache(usual_cache_dir(environ))


def share_of_disk(folder: Path, share: float) -> int:
    """Bytes: a share of the file system on which ``folder`` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return int(disk.f_blocks * disk.f_frsize * share)


def open_source(spec: JobSpec, data: Data, environ: Mapping[str, str], retry: Retry) -> Source:
    """A dataset's source. A folder is a prefix, a file is one object."""
    root, prefix = root_and_prefix(data.source)
    opening = None if root.startswith("file://") else Opening(root, access_of(spec, root, environ))
    return Source(
        url=data.source,
        # A folder's listing may be long, and to try it again as a whole would mean to hold it as a whole.
        store=opening(retry) if opening else FolderStore(Path(root.removeprefix("file://"))),
        prefix=prefix,
        include=data.include,
        exclude=data.exclude,
        verify=data.verify,
        extract=data.extract,
        opening=opening,
        patience=STORE_PATIENCE,
        on_retry=retry.on_retry,
    )


def root_and_prefix(url: str) -> tuple[str, str]:
    """Where a source's store begins, and what of it is meant: a bucket and a prefix, or a folder, or a file in one."""
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        path = Path(rest)
        return (url, "") if path.is_dir() else (f"file://{path.parent}", path.name)
    bucket, _, prefix = rest.partition("/")
    return f"{scheme}://{bucket}", prefix
