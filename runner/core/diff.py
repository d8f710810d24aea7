"""A remote listing and the record of a local copy, compared: what to fetch, keep, remove, and what cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

NAME_LIMIT = 255
"""Bytes of one name: what common file systems can hold."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Listed(Protocol):
    """One object of a listing: its key, its size in bytes, and a version that changes with the content."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the object to ``path``. ``reason`` is new, changed or damaged."""

    path: str
    key: str
    size: int
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """The local file is this version already."""

    path: str
    key: str
    size: int
    version: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A file that we brought and that the source no longer has."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that exists for its own sake: an object whose key ends in ``/``."""

    path: str
    key: str


@dataclass(frozen=True, slots=True)
class Skip:
    """An object that is left out, and why."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Objects that no disk can hold, or not together. Nothing may be fetched while there is one."""

    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of files and bytes."""

    fetch_files: int
    fetch_bytes: int
    keep_files: int
    keep_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Removes come first, then folders, then fetches. Paths are relative, ``/``-separated and harmless."""

    fetch: tuple[Fetch, ...]
    keep: tuple[Keep, ...]
    remove: tuple[Remove, ...]
    folders: tuple[Folder, ...]
    skip: tuple[Skip, ...]
    conflicts: tuple[Conflict, ...]
    totals: Totals


@dataclass(frozen=True, slots=True)
class Selection:
    """Which paths are wanted: all, or those that match one of ``include``; never those that match ``exclude``.

    In a pattern ``*`` and ``?`` do not cross ``/``, ``**`` does, ``[a-c]`` and ``[!a-c]`` are sets. A pattern without
    ``/`` matches a file's own name in any folder; one with ``/`` matches the whole path, and everything below it when
    it ends in ``/``.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def why_not(self) -> Callable[[str], str]:
        """A function from a path to the reason why it is left out; "" when it is wanted."""
        included, excluded = _any_of(self.include), _any_of(self.exclude)

        def reason(path: str) -> str:
            if excluded(path):
                return "excluded"
            return "" if not self.include or included(path) else "not included"

        return reason


ALL = Selection()


def plan(
    listing: Iterable[Listed],
    record: Mapping[str, Listed],
    *,
    prefix: str = "",
    selection: Selection = ALL,
    damaged: Collection[str] = frozenset(),
) -> Plan:
    """Compare a complete ``listing`` with the ``record`` of what was fetched, by path.

    ``prefix`` is the source within the store: a folder of keys, or one key. Recorded paths that are ``damaged`` on
    the disk are fetched again. Files that are in no record are nobody's business here.
    """
    wanted = _Wanted(prefix.rstrip("/"), selection.why_not())
    for item in listing:
        wanted.add(item)
    wanted.resolve()
    return _compare(wanted, record, damaged)


def relative_path(key: str, prefix: str) -> str | None:
    """Where ``key`` lies below ``prefix``, unchecked; the last segment when it is ``prefix``; None when elsewhere.

    ``prefix`` has no ``/`` at its end.
    """
    if not prefix:
        return key
    if key == prefix:
        return key.rpartition("/")[2]
    return key[len(prefix) + 1 :] if key.startswith(prefix + "/") else None


def flaw(path: str) -> str:
    """Why no disk should be given this path; "" for a harmless one."""
    if _CONTROL.search(path):
        return "a control character"
    try:
        sizes = [len(segment.encode()) for segment in path.split("/")]
    except UnicodeEncodeError:
        return "not Unicode text"
    if 0 in sizes:
        return "an empty name in the path"
    if max(sizes) > NAME_LIMIT:
        return f"a name longer than {NAME_LIMIT} bytes"
    return "" if {".", ".."}.isdisjoint(path.split("/")) else "'.' or '..' in the path"


@dataclass(slots=True)
class _Wanted:
    """The listing, sorted out: files and folders by path; grows while the listing is read."""

    prefix: str
    why_not: Callable[[str], str]
    files: dict[str, Listed] = field(default_factory=dict)
    markers: dict[str, str] = field(default_factory=dict)
    skip: list[Skip] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)

    def add(self, item: Listed) -> None:
        path = relative_path(item.key, self.prefix)
        if path is None or path == "":
            self.skip.append(Skip(item.key, "outside of the source" if path is None else "the source's own folder"))
        elif reason := self.why_not(path.removesuffix("/")):
            self.skip.append(Skip(item.key, reason))
        elif reason := flaw(path.removesuffix("/")):
            self.conflicts.append(Conflict((item.key,), reason))
        elif path.endswith("/"):
            self._add_marker(item, path.removesuffix("/"))
        else:
            self._add_file(item, path)

    def resolve(self) -> None:
        """Take out what cannot stand beside something else."""
        folders: dict[str, str] = {}
        for path, item in self.files.items():
            for folder in _folders_above(path):
                if folder in folders:
                    break
                folders[folder] = item.key
        for path in self.files.keys() & folders.keys():
            keys = (self.files.pop(path).key, folders[path])
            self.conflicts.append(Conflict(keys, f"{path!r} would be a file and a folder"))
        for path in [path for path in self.markers if self._under_a_file(path)]:
            self.skip.append(Skip(self.markers.pop(path), "an empty folder with the name of a file"))

    def _add_marker(self, item: Listed, path: str) -> None:
        if item.size:
            self.skip.append(Skip(item.key, "its name is a folder's, but it has content"))
        else:
            self.markers[path] = item.key

    def _add_file(self, item: Listed, path: str) -> None:
        taken = self.files.get(path)
        if taken is not None and taken.key != item.key:
            self.conflicts.append(Conflict((taken.key, item.key), f"both would be {path!r}"))
        else:
            # A listing that was cut into pages may tell of one key twice: the later news counts.
            self.files[path] = item

    def _under_a_file(self, path: str) -> bool:
        return path in self.files or any(folder in self.files for folder in _folders_above(path))


def _compare(wanted: _Wanted, record: Mapping[str, Listed], damaged: Collection[str]) -> Plan:
    fetch: list[Fetch] = []
    keep: list[Keep] = []
    for path, item in wanted.files.items():
        if reason := _why_fetch(item, record.get(path), path in damaged):
            fetch.append(Fetch(path, item.key, item.size, item.version, reason))
        else:
            keep.append(Keep(path, item.key, item.size, item.version))
    gone = () if wanted.conflicts else record.keys() - wanted.files.keys()
    return Plan(
        tuple(fetch),
        tuple(keep),
        tuple(Remove(path, "no longer in the source") for path in sorted(gone)),
        tuple(Folder(path, key) for path, key in wanted.markers.items()),
        tuple(wanted.skip),
        tuple(wanted.conflicts),
        Totals(len(fetch), sum(item.size for item in fetch), len(keep), sum(item.size for item in keep)),
    )


def _why_fetch(item: Listed, known: Listed | None, damaged: bool) -> str:
    if known is None:
        return "new"
    if (known.key, known.size, known.version) != (item.key, item.size, item.version):
        return "changed"
    return "damaged" if damaged else ""


def _folders_above(path: str) -> Iterable[str]:
    """``a/b`` and ``a`` for ``a/b/c``."""
    folder = path.rpartition("/")[0]
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _any_of(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    names = _union([pattern for pattern in patterns if "/" not in pattern])
    paths = _union([pattern for pattern in patterns if "/" in pattern])
    return lambda path: bool(names.fullmatch(path.rpartition("/")[2]) or paths.fullmatch(path))


def _union(patterns: list[str]) -> re.Pattern[str]:
    """A regex for any of the patterns; for none of them, one that matches nothing."""
    return re.compile("|".join(_regex(pattern) for pattern in patterns if pattern) or r"(?!)", re.DOTALL)


_TOKEN = re.compile(r"(?<![^/])(?:\*\*/)+|\*+|\[!?\]?[^]/]*\]|.", re.DOTALL)


def _regex(pattern: str) -> str:
    whole = pattern + "**" if pattern.endswith("/") else pattern
    return "".join(_translate(token) for token in _TOKEN.findall(whole.removeprefix("/")))


def _translate(token: str) -> str:
    if token.startswith("**/"):
        return r"(?:.*/)?"
    if token.startswith("**"):
        return r".*"
    if len(token) > 1:
        return _character_set(token)
    return {"*": r"[^/]*", "?": r"[^/]"}.get(token) or re.escape(token)


def _character_set(token: str) -> str:
    """``[a-c]`` as a regex. A set without members is no set; a range that runs backwards holds nothing."""
    body = token[1:-1].removeprefix("!")
    if not body:
        return re.escape(token)
    one_of = "|".join(_members(body)) or r"(?!)"
    return f"(?!/)(?!{one_of})." if token.startswith("[!") else f"(?!/)(?:{one_of})"


def _members(body: str) -> Iterable[str]:
    for first, last, single in re.findall(r"(.)-(.)|(.)", body, re.DOTALL):
        if single:
            yield re.escape(single)
        elif first <= last:
            yield f"[{re.escape(first)}-{re.escape(last)}]"
