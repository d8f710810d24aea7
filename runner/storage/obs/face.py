"""Whether OBS's other face, S3's protocol, may carry the bytes: it is faster, and no account of ours has proved it.

So it is proved each time, by reading: what the SDK tells of a bucket, the face must tell as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from runner.errors import CloudrunError
from runner.storage.access import Access
from runner.storage.api import ObjectInfo
from runner.storage.bucket import Answer, Bucket, Page, Whole
from runner.storage.obs.bucket import ObsBucket
from runner.storage.obs.credentials import Credentials, Keys
from runner.storage.obs.endpoint import endpoint_of
from runner.storage.obs.replies import version_of
from runner.storage.s3.bucket import S3Bucket

PAGES = 2
"""Pages compared: where a listing repeats itself, it does so on the second."""

SAMPLE = 64
"""Bytes compared."""


class QuickBucket(ObsBucket):
    """An OBS bucket that lists and reads through S3's protocol where that is proved, and does all else by the SDK.

    Proved is reading, so reading is all that the face is trusted with; the SDK's writing is as fast. It is decided by
    the first request, once.
    """

    def __init__(self, name: str, access: Access) -> None:
        super().__init__(name, access)
        self._access = access
        self._deciding = threading.Lock()
        self._reader: Bucket | str | None = None

    def page(self, prefix: str, token: str | None, *, delimiter: bool = False) -> Page:
        page = super().page if (face := self._face(prefix)) is None else face.page
        return page(prefix, token, delimiter=delimiter)

    @contextmanager
    def get(
        self, key: str, *, version: str | None = None, start: int = 0, length: int | None = None
    ) -> Iterator[Answer]:
        get = super().get if (face := self._face(key.rpartition("/")[0])) is None else face.get
        with get(key, version=version, start=start, length=length) as answer:
            yield answer

    def read(self, key: str, at_most: int | None = None) -> Whole:
        read = super().read if (face := self._face(key.rpartition("/")[0])) is None else face.read
        return read(key, at_most)

    def _face(self, prefix: str) -> Bucket | None:
        with self._deciding:
            if self._reader is None:
                self._reader = s3_face(self._name, self._access, prefix)
            return None if isinstance(self._reader, str) else self._reader


def s3_face(name: str, access: Access, prefix: str = "") -> Bucket | str:
    """The bucket through S3's protocol where that tells the same as the SDK below ``prefix``; else why not."""
    try:
        keys = Credentials(access.environ).keys()
        if keys.expires < math.inf:
            return "the machine's temporary keys are renewed by the SDK only"
        face = S3Bucket(name, translated(name, access, keys), scheme="obs")
        return _difference(ObsBucket(name, access), face, prefix) or face
    except CloudrunError as error:
        return error.message


def translated(name: str, access: Access, keys: Keys) -> Access:
    """``access`` in the words of S3."""
    endpoint = endpoint_of(name, access)
    environ = {word: value for word, value in access.environ.items() if not word.startswith("AWS_")}
    environ |= {"AWS_ACCESS_KEY_ID": keys.access, "AWS_SECRET_ACCESS_KEY": keys.secret}
    environ |= {"AWS_SESSION_TOKEN": keys.token} if keys.token else {}
    return replace(
        access,
        endpoint=endpoint.url,
        region=endpoint.region or "us-east-1",
        addressing="virtual" if endpoint.virtual else "path",
        profile=None,
        environ=environ | {"AWS_EC2_METADATA_DISABLED": "true"},
    )


def _difference(sdk: Bucket, face: Bucket, prefix: str) -> str | None:
    """What the two tell differently; None when nothing."""
    known, told = _listed(sdk, prefix), _listed(face, prefix)
    if known != told:
        return "the two protocols list different objects"
    full = next((info for info in known if info.size), None)
    if full is None:
        return "there is no object to read through both"
    if _beginning(sdk, full) == _beginning(face, full):
        return None
    return f"the two protocols read {full.key} differently"


def _listed(bucket: Bucket, prefix: str) -> list[ObjectInfo]:
    """The first objects, without times: only listings tell fractions of seconds."""
    found: list[ObjectInfo] = []
    page: Page | None = None
    for _ in range(PAGES):
        page = bucket.page(prefix, page.next if page else None)
        found += [info._replace(version=version_of(info.version), modified=0.0) for info in page.objects]
        if page.next is None:
            break
    return found


def _beginning(bucket: Bucket, info: ObjectInfo) -> tuple[int, str, bytes]:
    length = min(SAMPLE, info.size)
    with bucket.get(info.key, start=0, length=length) as answer:
        data = b"".join(bytes(chunk) for chunk in islice(answer.chunks, length))
        return answer.size, version_of(answer.version), data
