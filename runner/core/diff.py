"""One object of a listing, judged: which file it should be here, and why it has to be fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NAME_LIMIT = 255
"""Bytes of one name: what common file systems can hold."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NO_NAME = re.compile(r"(?:^|/)(\.{0,2})(?=/|$)")


class Listed(Protocol):
    """One object of a listing: its key, its size in bytes, and a version that changes with the content."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...


class Wanted(NamedTuple):
    """The object should be the file ``path``: relative, ``/``-separated and harmless."""

    path: str
    key: str
    size: int
    version: str


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that exists for its own sake: an empty object whose key ends in ``/``."""

    path: str
    key: str


@dataclass(frozen=True, slots=True)
class Skip:
    """An object that nobody asked for, and why."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Odd:
    """An object that was asked for and cannot be a file here, and why: it is left out, and its owner is told."""

    key: str
    reason: str


Verdict = Wanted | Folder | Skip | Odd


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


def judging(prefix: str = "", selection: Selection = ALL) -> Callable[[Listed], Verdict]:
    """A function from an object to what becomes of it. ``prefix`` is the source within the store: a folder of keys, or
    one key.
    """
    folder, why_not = prefix.rstrip("/"), selection.why_not()

    def judge(item: Listed) -> Verdict:
        path = relative_path(item.key, folder)
        if not path:
            return Skip(item.key, "outside of the source" if path is None else "the source's own folder")
        name = path.removesuffix("/")
        if reason := why_not(name):
            return Skip(item.key, reason)
        if reason := flaw(name):
            return Odd(item.key, reason)
        if name == path:
            return Wanted(path, item.key, item.size, item.version)
        return Odd(item.key, "its name is a folder's, but it has content") if item.size else Folder(name, item.key)

    return judge


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
    if found := _NO_NAME.search(path):
        return "'.' or '..' in the path" if found[1] else "an empty name in the path"
    try:
        size = len(path) if path.isascii() else len(path.encode())
    except UnicodeEncodeError:
        return "not Unicode text"
    if size > NAME_LIMIT and max(len(segment.encode()) for segment in path.split("/")) > NAME_LIMIT:
        return f"a name longer than {NAME_LIMIT} bytes"
    return ""


def why_fetch(item: Listed, known: Listed | None, *, intact: bool) -> str:
    """new, changed or damaged; "" when the file that is ``known`` here, and still ``intact``, is this object."""
    if known is None:
        return "new"
    if (known.key, known.size, known.version) != (item.key, item.size, item.version):
        return "changed"
    return "" if intact else "damaged"


def folders_above(path: str) -> Iterator[str]:
    """``a/b`` and ``a`` for ``a/b/c``."""
    folder = path.rpartition("/")[0]
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _any_of(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    if not patterns:
        return lambda _path: False
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
