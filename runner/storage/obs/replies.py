"""What OBS says in XML, as values of ours."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote_plus

from runner.errors import StoreError, StoreUnreachable
from runner.storage.api import ObjectInfo
from runner.storage.bucket import Page, Part, Unfinished
from runner.storage.refusals import Asked, error_of

_GONE = frozenset({"NoSuchKey", "NoSuchVersion"})


def version_of(etag: str) -> str:
    """An ETag as we keep it: listings, answers and headers quote it or do not."""
    return etag.strip('"')


def parse(asked: Asked, text: str, name: str) -> ET.Element:
    """The root of an answer, which is called ``name``. Raises what the answer tells when it is an error, which may come
    with status 200; and StoreUnreachable when somebody else has answered, as the portal of a network may.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314 - see above
    except ET.ParseError:
        raise StoreUnreachable(f"{asked.what}: the answer is no XML") from None
    if root.tag == "Error":
        raise error_of(asked, 200, root.findtext("Code") or "", root.findtext("Message") or "")
    if root.tag != name:
        raise StoreUnreachable(f"{asked.what}: the answer is no {name}")
    return root


def etag_in(asked: Asked, text: str, name: str) -> str:
    """The version that a copy or a finished upload has made: only an ETag says that it came to be."""
    etag = parse(asked, text, name).findtext("ETag")
    if not etag:
        raise StoreUnreachable(f"{asked.what}: the answer tells no ETag")
    return version_of(etag)


def is_exact(text: str) -> bool:
    """False when a listing must be asked for with encoded keys: XML cannot carry control characters."""
    try:
        ET.fromstring(text)  # noqa: S314 - see above
    except ET.ParseError:
        return False
    return "\r" not in text


def page_in(asked: Asked, text: str, token: str | None) -> Page:
    """A page of the listing of ``asked.key``. Raises StoreError when it is the page before."""
    root = parse(asked, text, "ListBucketResult")
    decoded = _decoder(root)
    objects = tuple(
        _object(asked, entry, decoded) for entry in root.findall("Contents") if entry.findtext("Key") is not None
    )
    below = tuple(decoded(entry.findtext("Prefix") or "") for entry in root.findall("CommonPrefixes"))
    names = [*(info.key for info in objects), *below]
    following = decoded(root.findtext("NextMarker") or "") or max(names, default="")
    if root.findtext("IsTruncated") != "true":
        following = ""
    elif not following or following == token or token in names:
        raise StoreError(f"{asked.what}: the listing does not advance", "the bucket cannot be listed reliably")
    return Page(
        # A prefix of nothing but blanks never reaches the store: the SDK takes it for none.
        tuple(info for info in objects if info.key.startswith(asked.key)),
        tuple(name.removeprefix(asked.key).removesuffix("/") for name in below if name.startswith(asked.key)),
        following or None,
    )


def _object(asked: Asked, entry: ET.Element, decoded: Callable[[str], str]) -> ObjectInfo:
    return ObjectInfo(
        decoded(entry.findtext("Key") or ""),
        int(_text(asked, entry, "Size")),
        version_of(_text(asked, entry, "ETag")),
        seconds_in(_text(asked, entry, "LastModified")),
    )


def _decoder(root: ET.Element) -> Callable[[str], str]:
    return unquote_plus if root.findtext("EncodingType") == "url" else str


def _text(asked: Asked, entry: ET.Element, name: str) -> str:
    text = entry.findtext(name)
    if text is None:
        raise StoreUnreachable(f"{asked.what}: the answer lacks {name}")
    return text


def seconds_in(iso: str) -> float:
    """Epoch seconds, whole ones as in the headers of a write: the listing's milliseconds are told nowhere else."""
    return float(int(datetime.fromisoformat(iso).timestamp()))


@dataclass(frozen=True, slots=True)
class Parts:
    """Some parts of an upload; ``next`` is the number after which the others begin."""

    parts: tuple[Part, ...]
    next: int | None


def parts_in(asked: Asked, text: str, after: int) -> Parts:
    root = parse(asked, text, "ListPartsResult")
    parts = tuple(
        Part(
            int(_text(asked, entry, "PartNumber")),
            int(_text(asked, entry, "Size")),
            version_of(_text(asked, entry, "ETag")),
        )
        for entry in root.findall("Part")
    )
    if root.findtext("IsTruncated") != "true":
        return Parts(parts, None)
    following = int(_text(asked, root, "NextPartNumberMarker"))
    if following <= after:
        raise StoreError(f"{asked.what}: the listing of its parts does not advance")
    return Parts(parts, following)


@dataclass(frozen=True, slots=True)
class Uploads:
    """Some unfinished uploads; ``next`` is the key and the id after which the others begin."""

    uploads: tuple[Unfinished, ...]
    next: tuple[str, str] | None


def uploads_in(asked: Asked, text: str, after: tuple[str, str] | None) -> Uploads:
    root = parse(asked, text, "ListMultipartUploadsResult")
    decoded = _decoder(root)
    uploads = tuple(
        Unfinished(
            decoded(_text(asked, entry, "Key")),
            _text(asked, entry, "UploadId"),
            seconds_in(_text(asked, entry, "Initiated")),
        )
        for entry in root.findall("Upload")
    )
    if root.findtext("IsTruncated") != "true":
        return Uploads(uploads, None)
    following = decoded(root.findtext("NextKeyMarker") or ""), root.findtext("NextUploadIdMarker") or ""
    if following in (after, ("", "")):
        raise StoreError(f"{asked.what}: the listing of uploads does not advance")
    return Uploads(uploads, following)


def refusals_in(asked: Asked, text: str) -> Iterator[tuple[str, str, str]]:
    """Key, code and message of each object that was not deleted, unless it was not there."""
    root = parse(asked, text, "DeleteResult")
    decoded = _decoder(root)
    for entry in root.findall("Error"):
        code = entry.findtext("Code") or "InternalError"
        if code not in _GONE:
            yield decoded(entry.findtext("Key") or ""), code, entry.findtext("Message") or ""
