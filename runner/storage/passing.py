"""A store that passes every call on to another one: the base of those that look at some of them first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, Sink, ignore_bytes


class PassingStore:
    """An :class:`ObjectStore` that is ``inner``, unless a method is overridden."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    @property
    def inner(self) -> ObjectStore:
        """Asked for each call: what passes may depend on the moment."""
        return self._inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def exclusive(self) -> bool:
        return self.inner.exclusive

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def folders(self, prefix: str = "") -> Iterator[str]:
        return self.inner.folders(prefix)

    def read(self, key: str) -> bytes:
        return self.inner.read(key)

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        return self.inner.look(key, at_most=at_most)

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        return self.inner.write(key, data, only_new=only_new, replacing=replacing)

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> int | None:
        return self.inner.download(key, target, version=version, on_bytes=on_bytes, note=note)

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        return self.inner.upload(source, key, on_bytes=on_bytes, sink=sink, note=note)

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        return self.inner.copy(source, key, version=version)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)

    def sweep(self, prefix: str, before: float) -> None:
        self.inner.sweep(prefix, before)
