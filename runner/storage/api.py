"""What every object store can do, and what its callers may rely on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from runner.errors import BadKey, ObjectChanged

OnBytes = Callable[[int], None]
"""Called with the number of bytes that have just moved; may be called from any thread."""


def ignore_bytes(count: int) -> None:
    """The progress listener of callers that do not show progress."""


KEY_LIMIT = 1024
"""Bytes of UTF-8 that every store can hold as a key."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> None:
    """Raise BadKey unless every store can hold ``key`` and every disk can follow it."""
    check_prefix(key)
    if key.rpartition("/")[2] in ("", ".", ".."):
        raise BadKey(f"bad key {key!r}: it ends in an empty, '.' or '..' segment")


def check_prefix(prefix: str) -> None:
    """Raise BadKey when no legal key can begin with ``prefix``."""
    if not set(prefix.split("/")[:-1]).isdisjoint(("", ".", "..")):
        raise BadKey(f"bad key {prefix!r}: an empty, '.' or '..' segment")
    if _CONTROL.search(prefix):
        raise BadKey(f"bad key {prefix!r}: a control character")
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError:
        raise BadKey(f"bad key {prefix!r}: not Unicode text") from None
    if size > KEY_LIMIT:
        raise BadKey(f"bad key {prefix[:60]!r}...: longer than {KEY_LIMIT} bytes")


def check_folder(prefix: str) -> None:
    """Raise BadKey unless ``prefix`` is empty or the way to a folder, which ends in ``/``."""
    check_prefix(prefix)
    if prefix and not prefix.endswith("/"):
        raise BadKey(f"bad key {prefix!r}: not a folder's, which ends in '/'")


def check_size(what: str, size: int, at_most: int | None) -> None:
    """Raise ObjectChanged for an object that is larger than it was."""
    if at_most is not None and size > at_most:
        raise ObjectChanged(f"{what} has grown to {size} bytes")


class ObjectInfo(NamedTuple):
    """One object as a listing or a write reports it.

    ``version`` changes whenever the content may have changed (an ETag, or inode and time); it is opaque.
    ``modified`` is in epoch seconds by the store's clock.
    """

    key: str
    size: int
    version: str
    modified: float


Sink = Callable[[memoryview], object]
"""Takes every byte of a file once, in order; the memory is only lent for the call."""


class ObjectStore(Protocol):
    """A flat space of keys below one root. All methods are safe to call from several threads.

    Keys are relative to the root, ``/``-separated, never empty, never with an empty, ``.`` or ``..`` segment or
    a control character: :class:`runner.errors.BadKey` otherwise. Only a listing may tell of other keys: those that
    somebody else has put there. Objects appear whole or not at all: a reader never sees part of a write, and a write
    that returned is durable. Errors are those of :mod:`runner.errors`: ObjectMissing, ObjectExists, ObjectChanged,
    AccessDenied, StoreUnreachable, BadKey; and DiskFull where a local disk ran out of room.
    """

    @property
    def url(self) -> str:
        """Where the root is, for people. Never holds credentials."""
        ...

    @property
    def exclusive(self) -> bool:
        """True when of several writers with one condition (``only_new``, ``replacing``) the store lets exactly one win:
        proved, not believed. Where it is False conditions are only looked at before the write, so that two may win.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix`` (a plain string prefix), in any order.

        An absent root is an empty store. A listing that cannot be completed raises; it never just ends early. Objects
        are handed out while the listing goes on, in bounded memory.
        """
        ...

    def folders(self, prefix: str = "") -> Iterator[str]:
        """The names between ``prefix`` (empty, or ending in ``/``) and the next ``/`` of all keys that have one, once
        each. Costs as much as there are folders, not as much as there are objects, where the store can do that.
        """
        ...

    def read(self, key: str) -> bytes:
        """The whole content of a small object. Raises ObjectMissing."""
        ...

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        """The whole content of a small object and the version that it belongs to. Raises ObjectMissing; ObjectChanged,
        before it is fetched, when it has more than ``at_most`` bytes.
        """
        ...

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        """Create or replace a small object. With ``only_new``, ObjectExists if the key is taken; with ``replacing``,
        ObjectChanged (or ObjectMissing) unless that is the version which is there. See :attr:`exclusive`.
        """
        ...

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> int | None:
        """Copy an object into the file ``target`` (created or truncated; not synced, not renamed: the caller publishes
        it). What lands there is one version of it; ObjectChanged when ``version`` is given and is not that one.
        CorruptData when the bytes do not match a digest that the store keeps, however often they are asked for.
        Returns the file's CRC32C where it was computed on the way, else None.

        In the file ``note`` the store may write down how far it is: a later call with the same ``target``, ``version``
        and ``note`` goes on from there, also in another process. It is removed when the download is complete.
        """
        ...

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        """Create or replace an object from a file. Raises SourceChanged when the file changed meanwhile.

        ``sink()`` is called for each reading of the file, from its beginning: what it returns sees exactly the bytes
        that are sent, so that a digest needs no second reading; the last one has seen the whole file. ``note`` is as
        for :meth:`download`: a later call with the same, unchanged, ``source`` sends only what has not arrived.
        """
        ...

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        """Create or replace ``key`` from another object, inside the store. Raises ObjectMissing; ObjectChanged when
        ``source`` is not ``version``.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; keys that do not exist are no error."""
        ...

    def sweep(self, prefix: str, before: float) -> None:
        """Forget unfinished writes below ``prefix`` (empty, or ending in ``/``) that were begun before the epoch second
        ``before``: their writers are dead, and some stores charge for what has arrived.
        """
        ...


def find(store: ObjectStore, key: str) -> ObjectInfo | None:
    """The object of exactly this key, as a listing tells of it; None when there is none."""
    return next((info for info in store.list(key) if info.key == key), None)
