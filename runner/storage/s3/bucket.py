"""A bucket behind S3's protocol: :class:`runner.storage.bucket.Bucket` in requests to S3."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import obstore

from runner.errors import ObjectChanged, ObjectExists, ObjectMissing, StoreError, StoreUnreachable
from runner.storage.access import Access
from runner.storage.api import ObjectInfo
from runner.storage.bucket import Answer, Buffer, Page, Part, Proof, Unfinished, Whole
from runner.storage.s3.answers import error_in, lacks_operation, needed, tag_in
from runner.storage.s3.arrival import ALGORITHM, UNSIGNED, Arrival, ArrivalTest, crc_text, md5_of
from runner.storage.s3.connection import Connection
from runner.storage.s3.copying import Copier
from runner.storage.s3.deleting import Deleter
from runner.storage.s3.lister import Mark, page_from_client, page_of, query_for
from runner.storage.s3.reading import Reader, head, is_md5

SMALL = 1 << 20
"""Bytes up to which a body is on its way in a moment, on any line."""


class S3Bucket:
    """One bucket. Nothing is asked, and nothing found out, before the first request.

    Versions are ETags without their quotes. ``scheme`` is what the owner calls such buckets.
    """

    def __init__(self, name: str, access: Access, *, scheme: str = "s3") -> None:
        self._connection = Connection(name, access, scheme)
        self._target: dict[str, Any] = {"Bucket": name}
        if access.requester_pays:
            self._target["RequestPayer"] = "requester"
        self._encrypted = {"ServerSideEncryption": access.sse} if access.sse else {}
        self._sealing = {"x-amz-server-side-encryption": access.sse} if access.sse else {}
        if access.kms_key:
            self._encrypted["SSEKMSKeyId"] = access.kms_key
            self._sealing["x-amz-server-side-encryption-aws-kms-key-id"] = access.kms_key
        self._reader = Reader(self._connection, self._target, access.sse)
        self._deleter = Deleter(self._connection)
        self._copier = Copier(self._connection, self._target, self._encrypted)
        self._arrival = ArrivalTest(self._connection, self._target, self._encrypted)
        self._lists_plainly = False

    @property
    def url(self) -> str:
        return self._connection.url

    def page(self, prefix: str, token: str | None, *, delimiter: bool = False) -> Page:
        with self._connection.asking("list", prefix):
            if self._lists_plainly:
                return self._plain_page(prefix, token, delimiter=delimiter)
            return self._fast_page(prefix, token, delimiter=delimiter)

    def _fast_page(self, prefix: str, token: str | None, *, delimiter: bool) -> Page:
        way, asked = self._connection.provider, self._connection.asked("list", prefix)
        query = query_for(prefix, token, delimiter=delimiter, version=way.list_version, url_encoding=way.url_encoding)
        answer = self._connection.wire.send(asked, "GET", query=query, refuse=False)
        if answer.status_code == 200:
            return page_of(asked, answer.content, prefix, token)
        # A mark of one protocol says nothing in another: only a listing that has not begun can change over.
        if token is not None or not lacks_operation(answer.status_code, answer.content):
            raise error_in(asked, answer.status_code, answer.content)
        self._lists_plainly = True
        return self._plain_page(prefix, token, delimiter=delimiter)

    def _plain_page(self, prefix: str, token: str | None, *, delimiter: bool) -> Page:
        """The second lister, for stores that have only the oldest protocol."""
        options = {"Delimiter": "/"} if delimiter else {}
        if token is not None:
            options["Marker"] = Mark.parse(token).mark
        answer = self._connection.client.list_objects(**self._target, Prefix=prefix, MaxKeys=1000, **options)
        return page_from_client(self._connection.asked("list", prefix), answer, prefix, token)

    def get(
        self, key: str, *, version: str | None = None, start: int = 0, length: int | None = None
    ) -> AbstractContextManager[Answer]:
        return self._reader.get(key, version, start, length)

    def read(self, key: str, at_most: int | None = None) -> Whole:
        return self._reader.read(key, at_most)

    def proof(self, key: str, version: str) -> Proof | None:
        return self._reader.proof(key, version)

    def put(self, key: str, data: Buffer, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        conditional = only_new or replacing is not None
        try:
            # A body that is mangled on its way must not win a race: the store refuses it at once.
            if conditional or len(data) > SMALL:
                tag = self._put_checked(key, data, only_new, replacing)
            else:
                tag = self._put_small(key, data)
        except ObjectChanged:
            if only_new:
                raise ObjectExists(f"{self.url}/{key} exists already") from None
            raise
        except ObjectMissing:
            if replacing is None:
                raise self._no_bucket() from None
            raise
        return ObjectInfo(key, len(data), tag, time.time())

    def _put_small(self, key: str, data: Buffer) -> str:
        with self._connection.asking("write", key) as asked:
            done = obstore.put(self._connection.objects, key, data, use_multipart=False)
            tag = tag_in(asked, done, "e_tag")
        self._check_arrived(key, data, tag)
        return tag

    def _put_checked(self, key: str, data: Buffer, only_new: bool, replacing: str | None) -> str:
        """Through the wire: a large body takes longer on a slow line than obstore waits for an answer."""
        tested = len(data) > SMALL
        arrival = self._arrival.found(key) if tested else Arrival.MD5
        headers = {**arrival.headers(data, arrival.sum(data)), **self._sealing}
        headers |= {"If-None-Match": "*"} if only_new else {}
        headers |= {"If-Match": f'"{replacing}"'} if replacing is not None else {}
        with self._connection.asking("write", key) as asked:
            answer = self._connection.wire.send(asked, "PUT", key=key, headers=headers, body=data, digest=UNSIGNED)
            tag = tag_in(asked, answer.headers)
        if arrival is Arrival.TAG or not tested:
            self._check_arrived(key, data, tag)
        return tag

    def _check_arrived(self, key: str, data: Buffer, tag: str) -> None:
        """Compare what was sent with what the store says it has: not all of them check the signature of a body."""
        if not is_md5(tag) or md5_of(data).hex() == tag:
            return
        if self.proof(key, tag) is not None:
            raise self._mangled(key)

    def _mangled(self, key: str) -> StoreUnreachable:
        return StoreUnreachable(f"{self.url}/{key}: what arrived in the store is not what was sent")

    def _no_bucket(self) -> StoreError:
        """For a new object nothing can be missing but the place that it goes to."""
        return StoreError(f"{self.url} does not exist", "check the bucket's name, region and endpoint")

    def begin(self, key: str) -> str:
        try:
            algorithm = ALGORITHM if self._arrival.found(key) is Arrival.CRC32C else {}
            with self._connection.asking("write", key) as asked:
                begun = self._connection.client.create_multipart_upload(
                    **self._target, **self._encrypted, **algorithm, Key=key
                )
                return str(needed(asked, begun, "UploadId"))
        except ObjectMissing:
            raise self._no_bucket() from None

    def put_part(self, key: str, upload: str, number: int, data: Buffer) -> Part:
        query = {"partNumber": str(number), "uploadId": upload}
        arrival = self._arrival.found(key)
        crc = arrival.sum(data)
        with self._connection.asking("write", key) as asked:
            answer = self._connection.wire.send(
                asked, "PUT", key=key, query=query, headers=arrival.headers(data, crc), body=data, digest=UNSIGNED
            )
            tag = tag_in(asked, answer.headers)
        if arrival is Arrival.TAG and tag != md5_of(data).hex():
            raise self._mangled(key)
        return Part(number, len(data), tag, crc)

    def parts(self, key: str, upload: str) -> list[Part]:
        with self._connection.asking("write", key) as asked:
            pages = self._connection.client.get_paginator("list_parts").paginate(
                **self._target, Key=key, UploadId=upload
            )
            told = [page for page in pages if needed(asked, page, "UploadId")]
            return [
                Part(part["PartNumber"], part["Size"], tag_in(asked, part))
                for page in told
                for part in page.get("Parts", ())
            ]

    def finish(self, key: str, upload: str, parts: Sequence[Part]) -> ObjectInfo:
        summed = self._arrival.found(key) is Arrival.CRC32C
        listed = [_as_listed(part, summed=summed) for part in parts]
        with self._connection.asking("write", key) as asked:
            done = self._connection.client.complete_multipart_upload(
                **self._target, Key=key, UploadId=upload, MultipartUpload={"Parts": listed}
            )
            tag_in(asked, done)
        # The answer's ETag is not always the object's.
        return self.head(key)

    def abort(self, key: str, upload: str) -> None:
        with suppress(ObjectMissing), self._connection.asking("write", key):
            self._connection.client.abort_multipart_upload(**self._target, Key=key, UploadId=upload)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        with self._connection.asking("list", prefix):
            pages = self._connection.client.get_paginator("list_multipart_uploads").paginate(
                **self._target, Prefix=prefix
            )
            for page in pages:
                needed(self._connection.asked("list", prefix), page, "Bucket")
                for one in page.get("Uploads", ()):
                    yield Unfinished(one["Key"], one["UploadId"], one["Initiated"].timestamp())

    def copy(self, source: str, key: str, *, version: str | None, size: int) -> ObjectInfo:
        return self._copier.copy(source, key, version, size)

    def delete(self, keys: Sequence[str]) -> None:
        self._deleter.delete(keys)

    def head(self, key: str) -> ObjectInfo:
        return head(self._connection, self._target, key)


def _as_listed(part: Part, *, summed: bool) -> dict[str, Any]:
    checksum = {"ChecksumCRC32C": crc_text(part.crc32c)} if summed and part.crc32c is not None else {}
    return {"PartNumber": part.number, "ETag": f'"{part.tag}"', **checksum}
