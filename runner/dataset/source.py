"""Where a dataset comes from, and what to say when nothing sensible is there."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from runner.core.diff import Odd
from runner.dataset.wire import Opens
from runner.errors import DataError
from runner.storage.api import ObjectInfo, ObjectStore
from runner.storage.retrying import OnRetry, ignore_retry

NAMED_AT_MOST = 5
"""How many keys one message names."""

LOOKED_AT = 1000
"""How many objects are listed to find out what lies beside a prefix that does not exist."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of keys in ``store``, or one key: the ``prefix``.

    url       names it for people and is, with the patterns, its identity in the cache
    verify    reads every cached file again
    extract   auto or never
    opening   opens the same store in another process; None where threads of this one are as good (folders)
    patience  seconds for which another process tries again what fails
    on_retry  is told of the retries there, from any thread
    """

    url: str
    store: ObjectStore
    prefix: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    verify: bool = False
    extract: str = "auto"
    opening: Opens | None = None
    patience: float = 60.0
    on_retry: OnRetry = ignore_retry


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Objects that cannot be files here: how many, and the first few of them."""

    count: int = 0
    named: tuple[Odd, ...] = ()

    def __str__(self) -> str:
        names = "; ".join(f"{odd.key!r} ({odd.reason})" for odd in self.named)
        more = f"; and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
        return names + more

    def add(self, odd: Odd) -> LeftOut:
        named = (*self.named, odd) if len(self.named) < NAMED_AT_MOST else self.named
        return LeftOut(self.count + 1, named)


NOTHING_LEFT_OUT = LeftOut()


def never() -> bool:
    """For those who do not stop."""
    return False


def objects_of(source: Source, stops: Callable[[], bool] = never) -> Iterator[ObjectInfo]:
    """Everything below the prefix taken as a folder; if there is nothing, the one object of exactly that key.

    Ends early once it ``stops``.
    """
    folder = source.prefix.rstrip("/")
    below = folder + "/" if folder else ""
    empty = True
    for info in takewhile(lambda _: not stops(), source.store.list(below)):
        empty = empty and info.key == below
        yield info
    if empty and folder == source.prefix != "":
        # Also a prefix of much else, perhaps; but the key itself comes first wherever listings are sorted.
        beside = takewhile(lambda _: not stops(), source.store.list(folder))
        yield from islice((info for info in beside if info.key == folder), 1)


def nothing_error(source: Source, unselected: int, left_out: LeftOut) -> DataError:
    """For a source without a single file to fetch or keep."""
    if left_out.count:
        return DataError(f"{source.url}: no object can be a file here: {left_out}", "rename them")
    if unselected:
        return DataError(f"{source.url}: none of its {unselected} objects is selected", "check include and exclude")
    return DataError(f"{source.url}: no objects", _nearest(source))


def _nearest(source: Source) -> str:
    folder = source.prefix.rstrip("/")
    while folder:
        folder, _, missing = folder.rpartition("/")
        names = _names_below(source.store, folder)
        if names:
            close = difflib.get_close_matches(missing, names, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            return f"{meant}the nearest place with objects is {_url(source, folder)}: {', '.join(names[:5])}"
    return f"{source.store.url} holds nothing: is the URL right?"


def _names_below(store: ObjectStore, folder: str) -> list[str]:
    below = folder + "/" if folder else ""
    keys = (info.key.removeprefix(below) for info in islice(store.list(below), LOOKED_AT))
    return sorted({name for key in keys if (name := key.partition("/")[0])})


def _url(source: Source, folder: str) -> str:
    return f"{source.store.url.rstrip('/')}/{folder}" if folder else source.store.url
