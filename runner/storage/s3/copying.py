"""Copies inside a bucket; the bytes never come here."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from runner.storage.api import ObjectInfo
from runner.storage.s3.answers import needed, tag_in
from runner.storage.s3.connection import Connection
from runner.storage.s3.reading import head

THREADS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that one request copies, and those of a part where there are more. A store that copies slowly must answer
    before the client takes it for dead.
    """

    at_once: int = 512 * 1024**2
    part: int = 256 * 1024**2


class Copier:
    def __init__(
        self,
        connection: Connection,
        target: Mapping[str, Any],
        encrypted: Mapping[str, Any],
        limits: Limits = Limits(),
    ) -> None:
        self._connection = connection
        self._target = target
        self._encrypted = encrypted
        self._limits = limits

    def copy(self, source: str, key: str, version: str | None, size: int) -> ObjectInfo:
        origin: dict[str, Any] = {"CopySource": {"Bucket": self._connection.bucket, "Key": source}}
        if version is not None:
            origin["CopySourceIfMatch"] = f'"{version}"'
        # Errors name the source: that is what may be missing, or changed.
        with self._connection.asking("write", source):
            if size <= self._limits.at_once:
                return self._at_once(origin, key, size)
            self._in_parts(origin, key, size)
        return head(self._connection, self._target, key)

    def _at_once(self, origin: Mapping[str, Any], key: str, size: int) -> ObjectInfo:
        done = self._connection.client.copy_object(**self._target, **self._encrypted, **origin, Key=key)
        asked = self._connection.asked("write", key)
        result = needed(asked, done, "CopyObjectResult")
        return ObjectInfo(key, size, tag_in(asked, result), needed(asked, result, "LastModified").timestamp())

    def _in_parts(self, origin: Mapping[str, Any], key: str, size: int) -> None:
        client = self._connection.client
        begun = client.create_multipart_upload(**self._target, **self._encrypted, Key=key)
        upload = needed(self._connection.asked("write", key), begun, "UploadId")
        place = {**self._target, "Key": key, "UploadId": upload}
        finished = False
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                parts = list(
                    pool.map(
                        lambda start: self._part({**place, **origin}, start, size), range(0, size, self._limits.part)
                    )
                )
            client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
            finished = True
        finally:
            if not finished:
                client.abort_multipart_upload(**place)

    def _part(self, request: Mapping[str, Any], start: int, size: int) -> dict[str, Any]:
        length = self._limits.part
        number, last = start // length + 1, min(start + length, size) - 1
        done = self._connection.client.upload_part_copy(
            **request, PartNumber=number, CopySourceRange=f"bytes={start}-{last}"
        )
        asked = self._connection.asked("write", request["Key"])
        return {"PartNumber": number, "ETag": f'"{tag_in(asked, needed(asked, done, "CopyPartResult"))}"'}
