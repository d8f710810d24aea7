"""From a URL to a store: the one place that knows which kind of store a scheme means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.errors import StoreError
from runner.storage.access import Access
from runner.storage.api import ObjectStore
from runner.storage.bucket import Bucket
from runner.storage.bucket_store import BucketStore
from runner.storage.folder import FolderStore
from runner.storage.retrying import Retry, RetryingStore

KINDS = "file:///folder, s3://bucket/prefix or obs://bucket/prefix"


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open one store, as a value that may be sent to a worker process (never to a log: see :class:`Access`)."""

    url: str
    access: Access

    def __call__(self, retry: Retry) -> ObjectStore:
        return open_store(self.url, self.access, retry)


def open_store(url: str, access: Access, retry: Retry) -> ObjectStore:
    """The store behind ``url``. No request is made. Raises StoreError for a kind that there is not."""
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return RetryingStore(FolderStore(Path(rest)), retry)
    name, _, path = rest.partition("/")
    prefix = path.strip("/")
    if not name:
        raise StoreError(f"{url} names no bucket", f"write {scheme}://bucket/prefix")
    return BucketStore(
        open_bucket(scheme, name, access), f"{prefix}/" if prefix else "", retry, at_once=access.concurrency
    )


def open_bucket(scheme: str, name: str, access: Access) -> Bucket:
    """A bucket of the scheme's provider. The clients are imported here: most commands need none of them."""
    if scheme == "s3":
        from runner.storage.s3.bucket import S3Bucket  # noqa: PLC0415 - see above

        return S3Bucket(name, access)
    if scheme == "obs":
        from runner.storage.obs.face import QuickBucket  # noqa: PLC0415 - see above

        return QuickBucket(name, access)
    raise StoreError(f"{scheme}:// is no kind of store that cloudrun knows", f"it knows {KINDS}")
