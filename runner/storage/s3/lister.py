"""Listings with exact keys, at a fraction of what botocore's parser costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from runner.errors import StoreError
from runner.storage.api import ObjectInfo
from runner.storage.bucket import Page
from runner.storage.refusals import Asked
from runner.storage.s3.answers import document


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a listing goes on: the store's own mark, and the first name of the page before, not to come twice."""

    mark: str
    first: str

    def __str__(self) -> str:
        return json.dumps([self.mark, self.first])

    @classmethod
    def parse(cls, token: str) -> Mark:
        mark, first = json.loads(token)
        return cls(mark, first)


def query_for(prefix: str, token: str | None, *, delimiter: bool, version: int, url_encoding: bool) -> dict[str, str]:
    """The question for one page."""
    query = {"list-type": "2"} if version == 2 else {}
    query |= {"encoding-type": "url"} if url_encoding else {}
    query |= {"delimiter": "/"} if delimiter else {}
    if token is not None:
        query["continuation-token" if version == 2 else "marker"] = Mark.parse(token).mark
    return {**query, "max-keys": "1000", "prefix": prefix}


def page_of(asked: Asked, body: bytes, prefix: str, token: str | None) -> Page:
    """The page in an answer. StoreUnreachable when it is cut off, StoreError when it is no listing or no new page."""
    root = document(asked, body)
    space, _, name = root.tag.rpartition("}")
    if name not in ("ListBucketResult", "ListBucketV2Result"):
        raise StoreError(f"{asked.what}: a listing was asked for, the answer is <{name}>", "is this an S3 endpoint?")
    return _Reader(asked, root, f"{space}}}" if space else "").page(prefix, token)


class _Reader:
    def __init__(self, asked: Asked, root: Element, space: str) -> None:
        self._asked = asked
        self._root = root
        self._space = space
        self._decode = _decoder(self._text("EncodingType"))

    def page(self, prefix: str, token: str | None) -> Page:
        objects = tuple(map(self._object, self._root.iterfind(f"{self._space}Contents")))
        below = [self._decode(self._need(one, "Prefix")) for one in self._root.iterfind(f"{self._space}CommonPrefixes")]
        names = [*(objects[:1] and [objects[0].key]), *below[:1]]
        mark = self._mark([*(objects[-1:] and [objects[-1].key]), *below[-1:]])
        check_advance(self._asked, names, mark, token)
        folders = tuple(name[len(prefix) :].removesuffix("/") for name in below)
        return Page(objects, folders, str(Mark(mark, min(names, default=""))) if mark is not None else None)

    def _mark(self, last: list[str]) -> str | None:
        """The store's mark for the next page; V1 gives none without a delimiter, where the last key serves."""
        if self._text("IsTruncated").lower() != "true":
            return None
        mark = self._text("NextContinuationToken") or self._decode(self._text("NextMarker")) or max(last, default="")
        if not mark:
            raise StoreError(f"{self._asked.what}: the listing goes on, but the store does not say where")
        return mark

    def _object(self, entry: Element) -> ObjectInfo:
        find, space = entry.findtext, self._space
        key, size, modified = find(f"{space}Key"), find(f"{space}Size"), find(f"{space}LastModified")
        if not key or size is None or modified is None:
            raise StoreError(f"{self._asked.what}: an entry of the listing lacks key, size or time")
        return ObjectInfo(self._decode(key), int(size), version_of(find(f"{space}ETag")), seconds_of(modified))

    def _text(self, name: str) -> str:
        return self._root.findtext(f"{self._space}{name}") or ""

    def _need(self, entry: Element, name: str) -> str:
        text = entry.findtext(f"{self._space}{name}")
        if not text:
            raise StoreError(f"{self._asked.what}: an entry of the listing lacks its {name}")
        return text


def check_advance(asked: Asked, names: list[str], mark: str | None, token: str | None) -> None:
    """StoreError when a page is the one before again: some stores do not know the mark that they gave."""
    if token is None:
        return
    before = Mark.parse(token)
    if mark == before.mark or (names and min(names) == before.first):
        raise StoreError(
            f"{asked.what}: the listing does not advance: the store gives the page at {before.first!r} twice"
        )


def page_from_client(asked: Asked, answer: Mapping[str, Any], prefix: str, token: str | None) -> Page:
    """The same from botocore's ``list_objects``: the second lister, for stores that have only the oldest one."""
    objects = tuple(
        ObjectInfo(entry["Key"], entry["Size"], version_of(entry.get("ETag")), entry["LastModified"].timestamp())
        for entry in answer.get("Contents", ())
    )
    below = [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]
    names = [*(info.key for info in objects), *below]
    mark = (answer.get("NextMarker") or max(names)) if answer["IsTruncated"] else None
    check_advance(asked, names, mark, token)
    folders = tuple(name[len(prefix) :].removesuffix("/") for name in below)
    return Page(objects, folders, str(Mark(mark, min(names))) if mark is not None else None)


def version_of(etag: str | None) -> str:
    """An ETag without the quotes that some answers have and others lack."""
    return (etag or "").removeprefix("W/").strip('"')


def seconds_of(moment: str) -> float:
    """``2026-11-30T19:33:40.000Z`` in epoch seconds."""
    return datetime.fromisoformat(moment).timestamp()


def _decoder(encoding: str) -> Callable[[str], str]:
    if encoding.lower() != "url":
        return str
    return lambda text: unquote_plus(text, errors="surrogateescape") if "%" in text or "+" in text else text
