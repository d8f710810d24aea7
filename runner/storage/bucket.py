"""What a bucket of some provider can do, request by request: the thin side of an object store.

A :class:`Bucket` tries each request once and turns every answer into a value or one of our errors. All that makes a
store trustworthy and fast (retries, parallel ranges and parts, resuming, verification) stands once, in
:class:`runner.storage.bucket_store.BucketStore`, above any Bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, NamedTuple, Protocol

from crc32c import crc32c

from runner.storage.api import ObjectInfo

Buffer = bytes | bytearray | memoryview
"""Bytes on their way out."""

PART_LIMIT = 10_000
"""Parts of one multipart upload, with every provider."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: objects, names of folders (with ``delimiter``), and the token of the next page."""

    objects: tuple[ObjectInfo, ...]
    folders: tuple[str, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """A digest of the whole object that the store keeps, in lower-case hex."""

    kind: Literal["md5", "crc32c"]
    digest: str

    def fits(self, pieces: Iterable[Buffer]) -> bool:
        """Whether this is the digest of all the pieces, one after the other."""
        if self.kind == "crc32c":
            return f"{reduce(lambda so_far, piece: crc32c(piece, so_far), pieces, 0):08x}" == self.digest
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in pieces:
            md5.update(piece)
        return md5.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Answer:
    """An object's bytes on their way in.

    size      of the whole object, also when only a range comes
    version   the object's version
    chunks    the bytes that were asked for, as they come; ends early only by raising
    proof     what seems to be the store's digest of the whole object: see :meth:`Bucket.proof`
    """

    size: int
    version: str
    chunks: Iterator[memoryview]
    proof: Proof | None = None


class Whole(NamedTuple):
    """A small object, all of it, and what an :class:`Answer` says of it."""

    data: bytes
    version: str
    proof: Proof | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the store has; ``number`` counts from 1, ``tag`` is what the store calls it, ``crc32c`` its checksum
    where one is known.
    """

    number: int
    size: int
    tag: str
    crc32c: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A multipart upload that was begun and neither finished nor aborted; ``began`` in epoch seconds."""

    key: str
    upload: str
    began: float


class Bucket(Protocol):
    """Requests to one bucket. Safe to use from many threads; one try each; keys are whole keys, checked by the caller.

    Errors are those of :mod:`runner.errors`, each with a hint that names the right, the bucket and the key.
    """

    @property
    def url(self) -> str:
        """``scheme://bucket``, for people."""
        ...

    def page(self, prefix: str, token: str | None, *, delimiter: bool = False) -> Page:
        """Up to 1,000 objects whose keys start with ``prefix``, exactly as they are called. With ``delimiter``, what
        lies below the next ``/`` is told as a folder's name. Raises StoreError when pages do not advance.
        """
        ...

    def get(
        self, key: str, *, version: str | None = None, start: int = 0, length: int | None = None
    ) -> AbstractContextManager[Answer]:
        """The bytes of an object from ``start`` on, ``length`` of them or as many as there are. BeyondEnd when that is
        behind the last one. With ``version``, ObjectChanged unless the object is that version: decided by the store,
        within the request. ``key`` may be odd (``a//b``, ``../x``).
        """
        ...

    def read(self, key: str, at_most: int | None = None) -> Whole:
        """All of a small object; ObjectChanged when it has more bytes than that. The same as :meth:`get`, for the many:
        at the least cost.
        """
        ...

    def proof(self, key: str, version: str) -> Proof | None:
        """The digest that the store keeps of this version, known for sure; None where it keeps none. An answer's may be
        a mistake (an ETag that looks like an MD5 and is none): ask before bytes that do not match are called damaged.
        """
        ...

    def put(self, key: str, data: Buffer, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        """Create or replace an object in one request. Conditions are sent, whether the store honours them or not."""
        ...

    def begin(self, key: str) -> str:
        """Begin a multipart upload; returns its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, data: Buffer) -> Part:
        """Send one part. Raises ObjectMissing when the upload is unknown (aborted, or finished)."""
        ...

    def parts(self, key: str, upload: str) -> list[Part]:
        """The parts that have arrived. Raises ObjectMissing when the upload is unknown."""
        ...

    def finish(self, key: str, upload: str, parts: Sequence[Part]) -> ObjectInfo:
        """Make the parts one object. Raises ObjectMissing when the upload is unknown."""
        ...

    def abort(self, key: str, upload: str) -> None:
        """Forget a multipart upload and its parts; no error when it is unknown."""
        ...

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Multipart uploads under way below ``prefix``."""
        ...

    def copy(self, source: str, key: str, *, version: str | None, size: int) -> ObjectInfo:
        """Copy inside the bucket; ``size`` is the source's. Raises ObjectMissing, ObjectChanged."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove up to 1,000 objects; those that do not exist are no error."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size, version and time of an object. Raises ObjectMissing."""
        ...
