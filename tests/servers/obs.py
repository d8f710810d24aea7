"""A server that speaks OBS as Huawei documents it, in this process and in memory.

Signatures are really checked: OBS's own, and those of S3 (v2 and v4) that OBS takes as well, each with its own family
of headers (``x-obs-``, ``x-amz-``). Buckets are reached by path and by name: ``http://127.0.0.1:port/bucket`` and
``http://bucket.obs.localhost:port``.

    with obs_server() as server:
        server.make_bucket("first")
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import socket
import ssl
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from uuid import uuid4

import pytest

from runner.storage.access import Access

ACCESS_KEY = "OBSTESTKEY"
SECRET_KEY = "obs-test-secret"  # opens nothing but the servers below
DOMAIN = "obs.localhost"
REGION = "test-1"
SMALLEST_PART = 100 << 10
SKEW = 900

SIGNED_PARAMETERS = frozenset({
    "acl", "cors", "delete", "encryption", "lifecycle", "location", "logging", "metadata", "notification", "partNumber",
    "policy", "quota", "restore", "storageClass", "storageinfo", "tagging", "uploadId", "uploads", "versionId",
    "versioning", "versions", "website",
})  # fmt: skip


class Refusal(Exception):
    """An answer that is not success."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.message = message or code


@dataclass(frozen=True)
class Request:
    """One request as it came, and when. ``path`` is still quoted; ``headers`` have lower-case names."""

    method: str
    host: str
    path: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    came: float = field(default_factory=time.time)

    @property
    def is_virtual(self) -> bool:
        return self.host.endswith(f".{DOMAIN}")

    @property
    def bucket(self) -> str:
        return self.host.removesuffix(f".{DOMAIN}") if self.is_virtual else unquote(self.path[1:].partition("/")[0])

    @property
    def key(self) -> str:
        return unquote(self.path[1:] if self.is_virtual else self.path[1:].partition("/")[2])

    @property
    def scheme(self) -> str:
        """The kind of signature: OBS, AWS or AWS4-HMAC-SHA256."""
        return self.headers.get("authorization", "").partition(" ")[0]

    @property
    def prefix(self) -> str:
        return "x-obs-" if self.scheme == "OBS" else "x-amz-"

    def own(self, name: str) -> str | None:
        """A header of the request's family."""
        return self.headers.get(self.prefix + name)


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass(frozen=True)
class Thing:
    """An object, or a part of one to come."""

    data: bytes
    etag: str
    modified: float
    sealed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Upload:
    key: str
    began: float
    sealed: Mapping[str, str]
    parts: dict[int, Thing] = field(default_factory=dict)


@dataclass
class Container:
    objects: dict[str, Thing] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)


@dataclass(frozen=True)
class Credential:
    secret: str
    token: str | None = None
    expires: float = float("inf")
    may: frozenset[str] = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})


class ObsServer:
    """A running server, what opens it, and what it was asked.

    conditions  whether a PUT heeds If-Match and If-None-Match: nothing says that OBS does
    pfs         whether its buckets are parallel file systems
    work        does what is asked; a test may put one in its place that does it wrong
    """

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY
    region = REGION

    def __init__(self, *, conditions: bool = False, pfs: bool = False, work: type[Work] | None = None) -> None:
        self.conditions = conditions
        self.work = work or Work
        self.pfs = pfs
        self.port = 0
        self.scheme = "http"
        self.credentials = {ACCESS_KEY: Credential(SECRET_KEY)}
        self.buckets: dict[str, Container] = {}
        self.requests: list[Request] = []
        self.lock = threading.RLock()

    @property
    def endpoint(self) -> str:
        """For buckets by path."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def virtual(self) -> str:
        """For buckets by name; only this process can resolve it."""
        return f"{self.scheme}://{DOMAIN}:{self.port}"

    def environ(self) -> dict[str, str]:
        return {"OBS_ACCESS_KEY_ID": self.access_key, "OBS_SECRET_ACCESS_KEY": self.secret_key}

    def access(self, **options: Any) -> Access:
        return replace(Access(endpoint=self.endpoint, region=self.region, environ=self.environ()), **options)

    def make_bucket(self, name: str) -> None:
        self.buckets[name] = Container()

    # Who asks

    def answer(self, request: Request) -> Reply:
        with self.lock:
            self.requests.append(request)
            self._check_who(request)
            if not request.bucket:
                raise Refusal(405, "MethodNotAllowed")
            container = self.buckets.get(request.bucket)
            if container is None:
                raise Refusal(404, "NoSuchBucket")
            if (told := request.headers.get("content-md5")) and told != _base64_md5(request.body):
                raise Refusal(400, "BadDigest")
            return self._carry_out(request, container)

    def _check_who(self, request: Request) -> None:
        check = {"OBS": _check_v2, "AWS": _check_v2, "AWS4-HMAC-SHA256": _check_v4}.get(request.scheme)
        if check is None:
            raise Refusal(403, "AccessDenied", "anonymous")
        name = _access_key_in(request)
        credential = self.credentials.get(name)
        if credential is None:
            raise Refusal(403, "InvalidAccessKeyId")
        _check_date(request)
        check(request, credential.secret)
        if request.own("security-token") != credential.token:
            raise Refusal(403, "InvalidToken")
        if time.time() > credential.expires:
            raise Refusal(400, "ExpiredToken")
        if request.method not in credential.may:
            raise Refusal(403, "AccessDenied")

    # What is asked

    def _carry_out(self, request: Request, container: Container) -> Reply:
        work = self.work(self, request, container)
        has = request.parameters.__contains__
        table: list[tuple[str, bool, Callable[[], Reply]]] = [
            ("POST", not request.key and has("delete"), work.delete_many),
            ("GET", not request.key and has("uploads"), work.list_uploads),
            ("GET", not request.key, work.list_objects),
            ("HEAD", not request.key, work.head_bucket),
            ("POST", has("uploads"), work.begin),
            ("POST", has("uploadId"), work.finish),
            ("PUT", has("uploadId"), work.put_part),
            ("GET", has("uploadId"), work.list_parts),
            ("DELETE", has("uploadId"), work.abort),
            ("PUT", bool(request.own("copy-source")), work.copy),
            ("PUT", bool(request.key), work.put),
            ("GET", True, work.get),
            ("HEAD", True, work.get),
            ("DELETE", bool(request.key), work.delete),
        ]
        for method, applies, carry_out in table:
            if method == request.method and applies:
                return carry_out()
        raise Refusal(405, "MethodNotAllowed")


class Work:
    """One request, let in, to one bucket."""

    def __init__(self, server: ObsServer, request: Request, container: Container) -> None:
        self.server = server
        self.request = request
        self.container = container
        self.now = request.came

    # Objects

    def put(self) -> Reply:
        there = self.container.objects.get(self.request.key)
        if self.server.conditions:
            self._check_conditions(there)
        return self._made(self._store(self.request.body, _md5(self.request.body), self._sealed()))

    def _check_conditions(self, there: Thing | None) -> None:
        if self.request.headers.get("if-none-match") == "*" and there is not None:
            raise Refusal(412, "PreconditionFailed")
        if (wanted := self.request.headers.get("if-match")) is not None:
            if there is None:
                raise Refusal(404, "NoSuchKey")
            if not _matches(wanted, there.etag):
                raise Refusal(412, "PreconditionFailed")

    def get(self) -> Reply:
        there = self._object(self.request.key)
        if (wanted := self.request.headers.get("if-match")) is not None and not _matches(wanted, there.etag):
            raise Refusal(412, "PreconditionFailed")
        unwanted = self.request.headers.get("if-none-match")
        if unwanted is not None and _matches(unwanted, there.etag):
            return Reply(304)
        headers = {"ETag": f'"{there.etag}"', "Last-Modified": formatdate(int(there.modified), usegmt=True)}
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream", **self._named(there.sealed)}
        if self.request.method == "HEAD":
            return Reply(200, b"", headers, len(there.data))
        span = _span(self.request.headers.get("range"), len(there.data))
        if span is None:
            return Reply(200, there.data, headers)
        first, after = span
        headers["Content-Range"] = f"bytes {first}-{after - 1}/{len(there.data)}"
        return Reply(206, there.data[first:after], headers)

    def copy(self) -> Reply:
        source = self._copy_source()
        made = self._store(source.data, _md5(source.data), self._sealed())
        return self._xml("CopyObjectResult", {"LastModified": _iso(made.modified), "ETag": f'"{made.etag}"'})

    def _copy_source(self) -> Thing:
        name = unquote(self.request.own("copy-source") or "")
        bucket, _, key = name.removeprefix("/").partition("/")
        container = self.server.buckets.get(bucket)
        if container is None:
            raise Refusal(404, "NoSuchBucket")
        if key not in container.objects:
            raise Refusal(404, "NoSuchKey")
        source = container.objects[key]
        wanted = self.request.own("copy-source-if-match")
        if wanted is not None and not _matches(wanted, source.etag):
            raise Refusal(412, "PreconditionFailed")
        return source

    def delete(self) -> Reply:
        self.container.objects.pop(self.request.key, None)
        return Reply(204)

    def delete_many(self) -> Reply:
        if "content-md5" not in self.request.headers:
            raise Refusal(400, "InvalidRequest", "Content-MD5 is missing")
        root = _without_names(ET.fromstring(self.request.body))
        encoded = root.findtext("EncodingType") == "url"
        keys = [(unquote(text) if encoded else text) for entry in root.iter("Key") if (text := entry.text or "")]
        if len(keys) > 1000:
            raise Refusal(400, "MalformedXML")
        result = ET.Element("DeleteResult")
        for key in keys:
            self.container.objects.pop(key, None)
            if root.findtext("Quiet") != "true":
                ET.SubElement(ET.SubElement(result, "Deleted"), "Key").text = key
        return self._document(result)

    # Listing

    def list_objects(self) -> Reply:
        ask = self.request.parameters
        if self.server.pfs and ask.get("list-type") == "2":
            raise Refusal(501, "NotImplemented")
        second = ask.get("list-type") == "2"
        marker = ask.get("continuation-token", ask.get("start-after", "")) if second else ask.get("marker", "")
        encode = quote if ask.get("encoding-type") == "url" else str
        if self.server.pfs and encode is quote:
            marker = ""  # the page repeats itself for ever
        prefix, delimiter = ask.get("prefix", ""), ask.get("delimiter", "")
        entries = _grouped(sorted(self.container.objects, key=str.encode), prefix, delimiter)
        rest = [name for name in entries if name.encode() > marker.encode()]
        page = rest[: min(int(ask.get("max-keys", 1000)), 1000)]
        root = ET.Element("ListBucketResult")
        _add(root, Name=self.request.bucket, Prefix=encode(prefix), MaxKeys="1000", Delimiter=encode(delimiter))
        _add(root, IsTruncated=str(len(page) < len(rest)).lower())
        if encode is quote:
            _add(root, EncodingType="url")
        if second:
            _add(root, KeyCount=str(len(page)))
        if len(page) < len(rest):
            _add(
                root, **{"NextContinuationToken" if second else "NextMarker": page[-1] if second else encode(page[-1])}
            )
        for name in page:
            self._add_entry(root, name, encode, is_folder=entries[name])
        return self._document(root, {"x-obs-bucket-location": REGION})

    def _add_entry(self, root: ET.Element, name: str, encode: Callable[[str], str], *, is_folder: bool) -> None:
        if is_folder:
            _add(ET.SubElement(root, "CommonPrefixes"), Prefix=encode(name))
            return
        there = self.container.objects[name]
        entry = ET.SubElement(root, "Contents")
        _add(entry, Key=encode(name), LastModified=_iso(there.modified), ETag=f'"{there.etag}"')
        _add(entry, Size=str(len(there.data)), StorageClass="STANDARD")

    def head_bucket(self) -> Reply:
        headers = {self.request.prefix + "bucket-location": REGION, "x-obs-version": "3.0"}
        return Reply(200, b"", headers | ({"x-obs-api": "3.0"} if "apiversion" in self.request.parameters else {}))

    # Multipart uploads

    def begin(self) -> Reply:
        name = uuid4().hex
        self.container.uploads[name] = Upload(self.request.key, self.now, self._sealed())
        told = {"Bucket": self.request.bucket, "Key": self.request.key, "UploadId": name}
        return self._xml("InitiateMultipartUploadResult", told)

    def put_part(self) -> Reply:
        upload, number = self._upload(), int(self.request.parameters["partNumber"])
        if not 1 <= number <= 10_000:
            raise Refusal(400, "InvalidArgument")
        copied = self.request.own("copy-source") is not None
        data = self._copied_range() if copied else self.request.body
        part = upload.parts[number] = Thing(data, _md5(data), self.now)
        if copied:
            return self._xml("CopyPartResult", {"LastModified": _iso(part.modified), "ETag": f'"{part.etag}"'})
        return self._made(part)

    def _copied_range(self) -> bytes:
        data = self._copy_source().data
        first, after = _span(self.request.own("copy-source-range"), len(data)) or (0, len(data))
        return data[first:after]

    def list_parts(self) -> Reply:
        ask = self.request.parameters
        after = int(ask.get("part-number-marker", 0))
        rest = sorted(item for item in self._upload().parts.items() if item[0] > after)
        page = rest[: min(int(ask.get("max-parts", 1000)), 1000)]
        root = ET.Element("ListPartsResult")
        _add(root, Bucket=self.request.bucket, Key=self.request.key, UploadId=ask["uploadId"])
        _add(root, IsTruncated=str(len(page) < len(rest)).lower())
        _add(root, NextPartNumberMarker=str(page[-1][0] if page else after))
        for number, part in page:
            entry = ET.SubElement(root, "Part")
            _add(entry, PartNumber=str(number), LastModified=_iso(part.modified))
            _add(entry, ETag=f'"{part.etag}"', Size=str(len(part.data)))
        return self._document(root)

    def list_uploads(self) -> Reply:
        ask = self.request.parameters
        marker = ask.get("key-marker", ""), ask.get("upload-id-marker", "")
        names = sorted((upload.key, name) for name, upload in self.container.uploads.items())
        rest = [one for one in names if one[0].startswith(ask.get("prefix", "")) and one > marker]
        page = rest[: min(int(ask.get("max-uploads", 1000)), 1000)]
        root = ET.Element("ListMultipartUploadsResult")
        _add(root, Bucket=self.request.bucket, IsTruncated=str(len(page) < len(rest)).lower())
        if page:
            _add(root, NextKeyMarker=page[-1][0], NextUploadIdMarker=page[-1][1])
        for key, name in page:
            entry = ET.SubElement(root, "Upload")
            _add(entry, Key=key, UploadId=name, Initiated=_iso(self.container.uploads[name].began))
        return self._document(root)

    def finish(self) -> Reply:
        upload = self._upload()
        root = _without_names(ET.fromstring(self.request.body))
        wanted = [(int(part.findtext("PartNumber") or 0), part.findtext("ETag") or "") for part in root.iter("Part")]
        if not wanted or wanted != sorted(set(wanted)):
            raise Refusal(400, "InvalidPartOrder" if wanted else "MalformedXML")
        parts = [upload.parts.get(number) for number, _ in wanted]
        chosen = [part for part in parts if part is not None]
        if len(chosen) < len(parts) or any(
            not _matches(etag, part.etag) for (_, etag), part in zip(wanted, chosen, strict=True)
        ):
            raise Refusal(400, "InvalidPart")
        if any(len(part.data) < SMALLEST_PART for part in chosen[:-1]):
            raise Refusal(400, "EntityTooSmall")
        digests = b"".join(bytes.fromhex(part.etag) for part in chosen)
        etag = f"{_md5(digests)}-{len(chosen)}"
        made = self._store(b"".join(part.data for part in chosen), etag, upload.sealed)
        del self.container.uploads[self.request.parameters["uploadId"]]
        told = {"Bucket": self.request.bucket, "Key": self.request.key, "ETag": f'"{made.etag}"'}
        return self._xml("CompleteMultipartUploadResult", told)

    def abort(self) -> Reply:
        self._upload()
        del self.container.uploads[self.request.parameters["uploadId"]]
        return Reply(204)

    # Pieces

    def _object(self, key: str) -> Thing:
        if key not in self.container.objects:
            raise Refusal(404, "NoSuchKey")
        return self.container.objects[key]

    def _upload(self) -> Upload:
        upload = self.container.uploads.get(self.request.parameters["uploadId"])
        if upload is None or upload.key != self.request.key:
            raise Refusal(404, "NoSuchUpload")
        return upload

    def _store(self, data: bytes, etag: str, sealed: Mapping[str, str]) -> Thing:
        made = Thing(data, etag, self.now, sealed)
        self.container.objects[self.request.key] = made
        return made

    def _sealed(self) -> dict[str, str]:
        names = ("server-side-encryption", "server-side-encryption-kms-key-id",
                 "server-side-encryption-aws-kms-key-id")  # fmt: skip
        return {name: value for name in names if (value := self.request.own(name)) is not None}

    def _named(self, sealed: Mapping[str, str]) -> dict[str, str]:
        return {self.request.prefix + name: value for name, value in sealed.items()}

    def _made(self, thing: Thing) -> Reply:
        return Reply(200, b"", {"ETag": f'"{thing.etag}"', **self._named(thing.sealed)})

    def _xml(self, root: str, children: Mapping[str, str]) -> Reply:
        element = ET.Element(root)
        _add(element, **children)
        return self._document(element)

    def _document(self, root: ET.Element, headers: Mapping[str, str] | None = None) -> Reply:
        year = "2015-06-30" if self.request.scheme == "OBS" else "2006-03-01"
        root.set("xmlns", f"http://obs.myhwclouds.com/doc/{year}/")
        return Reply(200, ET.tostring(root, "UTF-8"), {"Content-Type": "application/xml", **(headers or {})})


# Signatures


def _access_key_in(request: Request) -> str:
    told = request.headers["authorization"].partition(" ")[2]
    if request.scheme.startswith("AWS4"):
        return _fields(told)["Credential"].partition("/")[0]
    return told.rpartition(":")[0]


def _check_date(request: Request) -> None:
    told = request.own("date") or request.headers.get("date") or ""
    try:
        if re.fullmatch(r"\d{8}T\d{6}Z", told):
            when = datetime.strptime(told, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        else:
            when = parsedate_to_datetime(told).timestamp()
    except ValueError:
        raise Refusal(403, "AccessDenied", "a valid Date is missing") from None
    if abs(when - time.time()) > SKEW:
        raise Refusal(403, "RequestTimeTooSkewed")


def _check_v2(request: Request, secret: str) -> None:
    own = sorted((name, value) for name, value in request.headers.items() if name.startswith(request.prefix))
    date = "" if request.own("date") else request.headers.get("date", "")
    lines = [request.method, request.headers.get("content-md5", ""), request.headers.get("content-type", ""), date]
    lines += [f"{name}:{value}" for name, value in own]
    resource = f"/{request.bucket}{request.path}" if request.is_virtual else request.path
    signed = [
        f"{name}={value}" if value else name
        for name, value in sorted(request.parameters.items())
        if name in SIGNED_PARAMETERS or name.startswith(request.prefix)
    ]
    text = "\n".join([*lines, resource]) + ("?" + "&".join(signed) if signed else "")
    right = base64.b64encode(hmac.new(secret.encode(), text.encode(), hashlib.sha1).digest()).decode()
    if not hmac.compare_digest(right, request.headers["authorization"].rpartition(":")[2]):
        raise Refusal(403, "SignatureDoesNotMatch", text)


def _check_v4(request: Request, secret: str) -> None:
    told = _fields(request.headers["authorization"].partition(" ")[2])
    _, day, region, service, last = told["Credential"].split("/")
    names = told["SignedHeaders"].split(";")
    query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(request.parameters.items()))
    headers = "".join(f"{name}:{' '.join(request.headers.get(name, '').split())}\n" for name in names)
    content = request.headers.get("x-amz-content-sha256", "")
    if content != "UNSIGNED-PAYLOAD" and content != hashlib.sha256(request.body).hexdigest():
        raise Refusal(400, "XAmzContentSHA256Mismatch")
    path = quote(unquote(request.path), safe="/~")
    text = "\n".join([request.method, path, query, headers, ";".join(names), content])
    scope = f"{day}/{region}/{service}/{last}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    to_sign = "\n".join(["AWS4-HMAC-SHA256", request.headers.get("x-amz-date", ""), scope, digest])
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, last, to_sign):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    if not hmac.compare_digest(key.hex(), told["Signature"]):
        raise Refusal(403, "SignatureDoesNotMatch", text)


def _fields(text: str) -> dict[str, str]:
    return dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)


# Small things


def _md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _base64_md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def _matches(wanted: str, etag: str) -> bool:
    return wanted == "*" or unquote(wanted).strip('"') == etag


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _add(_parent: ET.Element, **children: str) -> None:
    for name, text in children.items():
        ET.SubElement(_parent, name).text = text


def _without_names(root: ET.Element) -> ET.Element:
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _grouped(keys: list[str], prefix: str, delimiter: str) -> dict[str, bool]:
    """Names of a listing, in order; True for those that stand for all keys below them."""
    names: dict[str, bool] = {}
    for key in keys:
        if key.startswith(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            names[prefix + head + found if found else key] = bool(found)
    return names


def _span(told: str | None, size: int) -> tuple[int, int] | None:
    """First byte, and the one after the last, of a Range header; None to ignore it."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", told or "")
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if int(first) >= size:
        raise Refusal(416, "InvalidRange")
    after = min(size, int(last) + 1) if last else size
    return (int(first), after) if after > int(first) else None


class Handler(BaseHTTPRequestHandler):
    """HTTP round an :class:`ObsServer`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    obs: ObsServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        return

    def do_CONNECT(self) -> None:
        """As a proxy: the tunnel ends here as well."""
        self.send_response(200)
        self.end_headers()
        self.close_connection = False

    def _serve(self) -> None:
        request = self._request()
        try:
            reply = self.obs.answer(request)
        except Refusal as refusal:
            reply = _told(request, refusal)
        self.send_response_only(reply.status)
        # The date is the one that an object got: a second may pass while it is stored.
        headers = {"Date": formatdate(int(request.came), usegmt=True), "Server": "OBS", **reply.headers}
        headers["x-obs-request-id"] = uuid4().hex.upper()
        if reply.status != 204:
            headers["Content-Length"] = str(len(reply.body) if reply.length is None else reply.length)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if request.method != "HEAD":
            self.wfile.write(reply.body)
        self.wfile.flush()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - http.server's names

    def _request(self) -> Request:
        # Not self.path, which http.server has already mended.
        target = self.requestline.split(" ")[1]
        if "://" in target:
            parts = urlsplit(target)
            target = target.partition(parts.netloc)[2] or "/"
        path, _, query = target.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        body = self.rfile.read(int(headers.get("content-length", 0)))
        return Request(self.command, host, path, dict(parse_qsl(query, keep_blank_values=True)), headers, body)


def _told(request: Request, refusal: Refusal) -> Reply:
    root = ET.Element("Error")
    _add(root, Code=refusal.code, Message=refusal.message, RequestId=uuid4().hex.upper(), HostId="test")
    body = b"" if request.method == "HEAD" else ET.tostring(root, "UTF-8")
    headers = {"Content-Type": "application/xml"}
    if request.method == "HEAD":
        headers |= {"x-obs-error-code": refusal.code, "x-obs-error-message": refusal.code}
    return Reply(refusal.status, body, headers)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


@contextmanager
def obs_server(
    *, conditions: bool = False, pfs: bool = False, work: type[Work] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[ObsServer]:
    """A server on a free port; names below ``localhost`` resolve while it runs."""
    server = ObsServer(conditions=conditions, pfs=pfs, work=work)
    listener = _Listener(("127.0.0.1", 0), type("Handler", (Handler,), {"obs": server}))
    server.port = listener.server_port
    if tls is not None:
        listener.socket = tls.wrap_socket(listener.socket, server_side=True)
        server.scheme = "https"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        with names_below_localhost():
            yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@contextmanager
def names_below_localhost() -> Iterator[None]:
    """Make them mean this machine, as RFC 6761 wants and glibc alone does not: for this process only."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **options: Any) -> Any:
        below = isinstance(host, str) and host.endswith(".localhost")
        return real("127.0.0.1" if below else host, *args, **options)

    socket.getaddrinfo = resolve
    try:
        yield
    finally:
        socket.getaddrinfo = real


@pytest.fixture(scope="session")
def obs() -> Iterator[ObsServer]:
    """One for all tests of a worker; tests use buckets of their own."""
    with obs_server() as server:
        yield server
