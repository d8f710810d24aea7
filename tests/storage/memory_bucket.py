"""A bucket in memory, whose requests can be made to fail."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from runner.errors import BeyondEnd, ObjectChanged, ObjectExists, ObjectMissing, StoreUnreachable
from runner.storage.api import ObjectInfo, check_size
from runner.storage.bucket import Answer, Buffer, Page, Part, Proof, Unfinished, Whole

CHUNK = 1 << 20
PAGE = 3

Hook = Callable[[str, str], None]
"""Called with (request, key) before each request, and as ("chunk", key) before each piece of an answer; may raise."""


@dataclass
class MemoryBucket:
    """A :class:`Bucket`. ``conditions`` False: like stores that answer 200 to every condition, and overwrite.
    ``proves`` False: like those whose ETags look like MD5s and are none.
    """

    hook: Hook = lambda _request, _key: None
    conditions: bool = True
    proves: bool = True
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    url: str = "memory://bucket"

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._names = map(str, itertools.count(1))

    def page(self, prefix: str, token: str | None, *, delimiter: bool = False) -> Page:
        self.hook("page", prefix)
        with self._lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix))
        names = sorted({self._name(key, prefix) if delimiter else key for key in keys})
        left = [name for name in names if token is None or name > token]
        some = left[:PAGE]
        infos = tuple(self.head(prefix + name if delimiter else name) for name in some if not name.endswith("//"))
        more = some[-1] if len(left) > PAGE else None
        return Page(infos, tuple(name.removesuffix("//") for name in some if name.endswith("//")), more)

    @staticmethod
    def _name(key: str, prefix: str) -> str:
        name, slash, _ = key.removeprefix(prefix).partition("/")
        return f"{name}//" if slash else name

    @contextmanager
    def get(
        self, key: str, *, version: str | None = None, start: int = 0, length: int | None = None
    ) -> Iterator[Answer]:
        self.hook("get", key)
        data, there = self._object(key, version)
        if start and start >= len(data):
            raise BeyondEnd(key)
        proof = Proof("md5", hashlib.md5(data).hexdigest())
        end = len(data) if length is None else min(len(data), start + length)
        yield Answer(len(data), there, self._chunks(key, data[start:end]), proof)

    def read(self, key: str, at_most: int | None = None) -> Whole:
        with self.get(key) as answer:
            check_size(key, answer.size, at_most)
            return Whole(b"".join(answer.chunks), answer.version, answer.proof)

    def proof(self, key: str, version: str) -> Proof | None:
        self.hook("proof", key)
        return Proof("md5", hashlib.md5(self._object(key, version)[0]).hexdigest()) if self.proves else None

    def _chunks(self, key: str, data: bytes) -> Iterator[memoryview]:
        for at in range(0, len(data), CHUNK):
            self.hook("chunk", key)
            yield memoryview(data)[at : at + CHUNK]

    def _object(self, key: str, version: str | None) -> tuple[bytes, str]:
        with self._lock:
            if key not in self.objects:
                raise ObjectMissing(key)
            data, there = self.objects[key]
        if version not in (None, there):
            raise ObjectChanged(key)
        return data, there

    def put(self, key: str, data: Buffer, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        self.hook("put", key)
        with self._lock:
            if self.conditions and only_new and key in self.objects:
                raise ObjectExists(key)
            if self.conditions and replacing is not None:
                self._object(key, replacing)
            self.objects[key] = (bytes(data), f'"{next(self._names)}"')
        self.hook("put answered", key)
        return self.head(key)

    def begin(self, key: str) -> str:
        self.hook("begin", key)
        with self._lock:
            upload = next(self._names)
            self.uploads[upload] = (key, {})
        return upload

    def put_part(self, key: str, upload: str, number: int, data: Buffer) -> Part:
        self.hook("put_part", key)
        self._parts(upload)[number] = bytes(data)
        return self._part(number, bytes(data))

    def parts(self, key: str, upload: str) -> list[Part]:
        self.hook("parts", key)
        return [self._part(number, data) for number, data in sorted(self._parts(upload).items())]

    @staticmethod
    def _part(number: int, data: bytes) -> Part:
        return Part(number, len(data), hashlib.md5(data).hexdigest())

    def _parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self.uploads:
            raise ObjectMissing(upload)
        return self.uploads[upload][1]

    def finish(self, key: str, upload: str, parts: Sequence[Part]) -> ObjectInfo:
        self.hook("finish", key)
        with self._lock:
            there = self._parts(upload)
            assert [part.number for part in parts] == list(range(1, len(parts) + 1))
            if any(self._part(part.number, there[part.number]) != part for part in parts):
                raise StoreUnreachable("a part is another one")
            self.objects[key] = (b"".join(there[part.number] for part in parts), f'"{next(self._names)}"')
            del self.uploads[upload]
        self.hook("finish answered", key)
        return self.head(key)

    def abort(self, key: str, upload: str) -> None:
        self.hook("abort", key)
        self.uploads.pop(upload, None)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        self.hook("unfinished", prefix)
        found = [(key, upload) for upload, (key, _) in self.uploads.items() if key.startswith(prefix)]
        yield from (Unfinished(key, upload, 1000.0) for key, upload in found)

    def copy(self, source: str, key: str, *, version: str | None, size: int) -> ObjectInfo:
        self.hook("copy", source)
        data, _ = self._object(source, version)
        assert size == len(data)
        return self.put(key, data)

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self.hook("delete", key)
                self.objects.pop(key, None)

    def head(self, key: str) -> ObjectInfo:
        self.hook("head", key)
        data, version = self._object(key, None)
        return ObjectInfo(key, len(data), version, 1_700_000_000.0)
