"""An object store over any bucket: the one place of retries, parallel transfers, resuming and verification."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from runner.errors import (
    CloudrunError,
    NotOffered,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StoreUnreachable,
)
from runner.storage.api import ObjectInfo, OnBytes, Sink, check_folder, check_key, check_prefix, ignore_bytes
from runner.storage.bucket import Bucket, Page
from runner.storage.buffers import Buffers
from runner.storage.download import Download
from runner.storage.requests import Requests
from runner.storage.retrying import Retry, write_surely
from runner.storage.throttle import Throttle
from runner.storage.upload import Upload

AT_ONCE = 64
"""Requests at the same time: a store whose first byte takes 20 ms needs so many for 3,000 small objects per second."""

BUFFERS = 8
"""Parts in memory at the same time, whatever the number of files."""

DELETED_AT_ONCE = 1000
PROBE = ".cloudrun-probe-"


class BucketStore:
    """The keys below ``prefix`` (empty, or ending in ``/``) of a bucket."""

    def __init__(self, bucket: Bucket, prefix: str, retry: Retry, *, at_once: int | None = None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        throttle = Throttle(at_once or AT_ONCE, retry.is_over)
        self._requests = Requests(bucket, retry, throttle, Buffers(BUFFERS, retry.is_over))
        self._probing = threading.Lock()
        self._exclusive: bool | None = None

    @property
    def url(self) -> str:
        return f"{self._bucket.url}/{self._prefix}".rstrip("/")

    @property
    def exclusive(self) -> bool:
        with self._probing:
            if self._exclusive is None:
                # Asked twice before it is taken for incapable: a write that arrives late spoils the first answer.
                self._exclusive = self._prove_conditions() or self._prove_conditions()
            return self._exclusive

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        for page in self._pages(prefix, delimiter=False):
            for info in page.objects:
                if PROBE not in info.key or not info.key.rpartition("/")[2].startswith(PROBE):
                    yield info._replace(key=info.key[len(self._prefix) :]) if self._prefix else info

    def folders(self, prefix: str = "") -> Iterator[str]:
        check_folder(prefix)
        for page in self._pages(prefix, delimiter=True):
            yield from page.folders

    def read(self, key: str) -> bytes:
        return self.look(key)[0]

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        whole = self._whole(key)
        return self._requests.send("read", lambda: self._look(whole, at_most))

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        whole = self._whole(key)
        if only_new or replacing is not None:
            info = self._write_if(key, data, only_new=only_new, replacing=replacing)
        else:
            info = self._requests.send("write", lambda: self._bucket.put(whole, data))
        return info._replace(key=key)

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> int | None:
        download = Download(self._requests, self._whole(key), target, on_bytes, note)
        if version is not None:
            return download.run(version)
        # Any version will do, so one that was replaced meanwhile is no news for the caller.
        return self._requests.retry("download", lambda: download.run(None), _has_changed)

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        info = Upload(self._requests, self._whole(key), on_bytes, sink, note).run(source)
        return info._replace(key=key)

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        there, whole = self._whole(source), self._whole(key)

        def copy() -> ObjectInfo:
            found = self._bucket.head(there)
            return self._bucket.copy(there, whole, version=version or found.version, size=found.size)

        return self._requests.send("copy", copy)._replace(key=key)

    def delete(self, keys: Iterable[str]) -> None:
        doomed = (self._whole(key) for key in keys)
        while batch := tuple(dict.fromkeys(islice(doomed, DELETED_AT_ONCE))):
            self._requests.send("delete", lambda batch=batch: self._bucket.delete(batch))  # type: ignore[misc]

    def sweep(self, prefix: str, before: float) -> None:
        check_folder(prefix)
        left = self._requests.send("sweep", lambda: list(self._bucket.unfinished(self._prefix + prefix)))
        for one in left:
            if one.began < before:
                self._requests.send("sweep", lambda one=one: self._bucket.abort(one.key, one.upload))  # type: ignore[misc]

    def _whole(self, key: str) -> str:
        """The bucket's key for ours."""
        check_key(key)
        if self._prefix:
            check_key(self._prefix + key)
        return self._prefix + key

    def _pages(self, prefix: str, *, delimiter: bool) -> Iterator[Page]:
        token: str | None = None
        while True:
            page = self._requests.send(
                "list",
                lambda token=token: self._bucket.page(self._prefix + prefix, token, delimiter=delimiter),  # type: ignore[misc]
            )
            yield page
            if page.next is None:
                return
            token = page.next

    def _look(self, whole: str, at_most: int | None = None) -> tuple[bytes, str]:
        found = self._bucket.read(whole, at_most)
        proof = found.proof
        wrong = proof is not None and not proof.fits([found.data])
        if wrong and (sure := self._bucket.proof(whole, found.version)) is not None:
            raise StoreUnreachable(f"{self._bucket.url}/{whole}: its bytes do not match its {sure.kind}")
        return found.data, found.version

    # Conditions

    def _write_if(self, key: str, data: bytes, *, only_new: bool, replacing: str | None) -> ObjectInfo:
        whole = self._whole(key)
        if not self.exclusive:
            self._check_first(whole, only_new=only_new, replacing=replacing)
            return self._requests.send("write", lambda: self._bucket.put(whole, data))

        def write() -> ObjectInfo:
            with self._requests.throttle.turn():
                return self._put_if(whole, data, only_new=only_new, replacing=replacing)

        return write_surely(self._requests.retry, self, key, data, write)

    def _put_if(self, whole: str, data: bytes, *, only_new: bool, replacing: str | None) -> ObjectInfo:
        try:
            return self._bucket.put(whole, data, only_new=only_new, replacing=replacing)
        except ObjectChanged as error:
            raise (ObjectExists(f"{self._bucket.url}/{whole} exists") if only_new else error) from None

    def _check_first(self, whole: str, *, only_new: bool, replacing: str | None) -> None:
        """Where the store cannot decide: a look beforehand, which two writers may both pass."""
        try:
            there = self._requests.send("write", lambda: self._bucket.head(whole))
        except ObjectMissing:
            if only_new:
                return
            raise
        if only_new:
            raise ObjectExists(f"{self._bucket.url}/{whole} exists")
        if there.version != replacing:
            raise ObjectChanged(f"{self._bucket.url}/{whole} is not the version that was asked for")

    def _prove_conditions(self) -> bool:
        """Whether the store keeps to conditions: some answer 200 to all and overwrite, some know none."""
        whole = f"{self._prefix}{PROBE}{secrets.token_hex(8)}"
        # What refuses this is no store.
        first = self._requests.send("probe", lambda: self._bucket.put(whole, b"first"))
        try:
            return (
                self._refuses(whole, only_new=True)
                and self._refuses(whole, replacing=_other_than(first.version))
                and self._takes(whole, replacing=first.version)
            )
        except NotOffered:
            return False
        finally:
            with suppress(CloudrunError):
                self._requests.send("probe", lambda: self._bucket.delete([whole]))

    def _refuses(self, whole: str, *, only_new: bool = False, replacing: str | None = None) -> bool:
        try:
            self._requests.send(
                "probe", lambda: self._bucket.put(whole, b"wrong", only_new=only_new, replacing=replacing)
            )
        except (ObjectChanged, ObjectExists):
            return True
        return False

    def _takes(self, whole: str, replacing: str) -> bool:
        # Asked again after a lost answer, the store refuses what it has taken: the content tells.
        with suppress(ObjectChanged):
            self._requests.send("probe", lambda: self._bucket.put(whole, b"second", replacing=replacing))
        return self._requests.send("probe", lambda: self._look(whole))[0] == b"second"


def _other_than(version: str) -> str:
    """A version that looks like one of this store and is none of this object."""
    digit = next(place for place, char in enumerate(version) if char.isalnum())
    return version[:digit] + ("1" if version[digit] == "0" else "0") + version[digit + 1 :]


def _has_changed(error: BaseException) -> bool:
    """True for the one failure of a download that a new beginning cures; the rest was tried again already."""
    return isinstance(error, ObjectChanged)
