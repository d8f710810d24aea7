"""The checkpoint folder on this machine: which of its entries are complete, finished checkpoints.

Only what has its :class:`Places` is looked at: the direct children of a folder, or what matches a pattern. It counts
when its structure is whole (see :mod:`runner.checkpoint.formats`) and there is proof that its writer has finished: the
structure tells, it was renamed into place after its last write, or it was left alone for a while; and nobody has it
open for writing.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from runner.checkpoint.formats import (
    Proof,
    Verdict,
    judge,
    looks_like_checkpoint,
    may_be_checkpoint,
    step_of,
    walk,
)
from runner.checkpoint.layout import MANIFEST_NAME
from runner.checkpoint.manifest import check_path, signature
from runner.checkpoint.places import Places
from runner.core.state import Checkpoint
from runner.errors import CorruptData
from runner.files import is_part, make_directory, sync_directory

SETTLE_S = 5.0

_BEST = re.compile(r"(?:^|[-_.])best(?:[-_.]|$)", re.IGNORECASE)
_LEFTOVER = re.compile(r"\.?tmp(?:[-_.].*|[a-z0-9_]{6,8})?|.*\.(?:tmp|part|partial)")


class LocalFile(NamedTuple):
    """A file of a checkpoint: path as in :class:`runner.checkpoint.manifest.FileEntry`, bytes, nanoseconds."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on this disk, complete or not.

    name           relative to the root of its :class:`Places`, as in a manifest
    step           told by the name, or by the checkpoint's own files; None where neither does
    newest_mtime   of its files, epoch seconds
    published      renamed into place after its last write: it cannot be half-written by a writer that renames
    """

    name: str
    path: Path
    is_dir: bool
    step: int | None
    files: tuple[LocalFile, ...]
    bytes: int
    newest_mtime: float
    signature: str
    verdict: Verdict
    published: bool

    def as_checkpoint(self, step: int, attempt: int = 0) -> Checkpoint:
        """The value the core works with, while the checkpoint is not stored."""
        return Checkpoint(
            id=f"local:{self.name}",
            step=step,
            name=self.name,
            attempt=attempt,
            files=len(self.files),
            bytes=self.bytes,
            signature=self.signature,
            time=self.newest_mtime,
        )


@dataclass(frozen=True, slots=True)
class _Stats:
    """All that a scan learns without opening a file; equal stats mean that nothing need be judged again."""

    files: tuple[LocalFile, ...]
    inodes: tuple[int, ...]
    changes_ns: tuple[int, ...]
    is_dir: bool
    published: bool


@dataclass(slots=True)
class _Seen:
    found: Found
    stats: _Stats
    since: float
    state: Literal["waiting", "delivered", "refused"] = "waiting"


def scan(where: Path | Places, format: str = "auto") -> list[Found]:  # noqa: A002 (the word of the spec)
    """Every entry that is not hidden, temporary, a link or a special file; complete or not, as the verdict says.

    Folders in which no name suggests a checkpoint are left out, however much is in them. A folder that does not exist
    is empty.
    """
    places = _places(where)
    return [_found(places, name, stats, format) for name, stats in _entries(places, format)]


def _places(where: Path | Places) -> Places:
    return where if isinstance(where, Places) else Places(where)


def local_files(path: Path) -> tuple[tuple[LocalFile, int], ...]:
    """The files of the checkpoint ``path`` with their inodes, sorted by path. Raises OSError when it is gone."""
    stats = _stats(path)
    return tuple(zip(stats.files, stats.inodes, strict=True))


def is_unchanged(found: Found) -> bool:
    """True while the files on the disk are those that were found."""
    try:
        return _stats(found.path).files == found.files
    except OSError:
        return False


def _entries(places: Places, wanted: str) -> Iterator[tuple[str, _Stats]]:
    for name, entry in places.entries():
        # An entry may vanish, or be swapped for another, between the listing and now.
        with suppress(OSError):
            path = Path(entry.path)
            if entry.is_file() or (entry.is_dir() and may_be_checkpoint(path, wanted)):
                yield name, _stats(path)


def _stats(path: Path) -> _Stats:
    top = os.lstat(path)
    if not stat.S_ISDIR(top.st_mode):
        files = (LocalFile(path.name, top.st_size, top.st_mtime_ns),)
        return _Stats(
            files, (top.st_ino,), (top.st_ctime_ns,), is_dir=False, published=top.st_ctime_ns > top.st_mtime_ns
        )
    members = [member for member in walk(path) if member[0] != MANIFEST_NAME]
    newest = max((status.st_mtime_ns for _, status in members), default=0)
    plain = [(name, status) for name, status in members if not name.endswith("/")]
    return _Stats(
        files=tuple(sorted(LocalFile(name, status.st_size, status.st_mtime_ns) for name, status in plain)),
        inodes=tuple(status.st_ino for _, status in sorted(plain, key=lambda member: member[0])),
        changes_ns=(top.st_ctime_ns, *(status.st_ctime_ns for _, status in members)),
        is_dir=True,
        published=top.st_ctime_ns > top.st_mtime_ns and top.st_ctime_ns >= newest,
    )


def _found(places: Places, name: str, stats: _Stats, wanted: str) -> Found:
    path = places.root / name
    verdict = _storable(judge(path, wanted), name, stats.files)
    named = step_of(path.name)
    return Found(
        name=name,
        path=path,
        is_dir=stats.is_dir,
        step=verdict.step if named is None else named,
        files=stats.files,
        bytes=sum(file.size for file in stats.files),
        newest_mtime=max((file.mtime_ns for file in stats.files), default=0) / 1e9,
        signature=signature(stats.files),
        verdict=verdict,
        published=stats.published,
    )


def _storable(verdict: Verdict, own: str, files: Iterable[LocalFile]) -> Verdict:
    """A checkpoint with a file name that no store can hold cannot be kept."""
    try:
        for name in (own, *(file.path for file in files)):
            check_path(name)
    except CorruptData:
        return replace(verdict, complete=False, reason="has a file name that cannot be stored")
    return verdict


class Shelf:
    """Watches the places of checkpoints: tells each complete checkpoint once, when it is proved finished.

    ``now`` is always epoch seconds and never runs backwards. Looking at an unchanged folder costs one stat per file.
    Start with :meth:`last_look` when the folder may hold what an earlier, killed trainer left: what that look refuses
    is never taken later, for nobody goes on writing it.
    """

    def __init__(
        self,
        where: Path | Places,
        format: str = "auto",  # noqa: A002 (the word of the spec)
        *,
        settle_s: float = SETTLE_S,
        proc: Path = Path("/proc"),
    ) -> None:
        self._places = _places(where)
        self._format = format
        self._settle_s = settle_s
        self._proc = proc
        self._seen: dict[str, _Seen] = {}
        self._refused: tuple[tuple[str, str], ...] = ()
        self._doubtful: tuple[tuple[str, str], ...] = ()
        self._delivered_shapes: set[frozenset[str]] = set()

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(name, reason) for each entry that looks like a checkpoint and that the last look did not take."""
        return self._refused

    @property
    def doubtful(self) -> tuple[tuple[str, str], ...]:
        """Those of the refused that look complete, and only lack the proof that their writer had finished."""
        return self._doubtful

    def look(self, now: float) -> list[Found]:
        """What has become a complete, finished checkpoint since the last look, lowest step first.

        A name whose files changed since it was told counts as new.
        """
        self._update(now)
        ready = [seen for seen in self._candidates() if self._has_settled(seen, now)]
        unsure = [seen.found for seen in ready if not (seen.found.published and _is_proved(seen.found))]
        busy = open_for_writing(unsure, self._proc) if unsure else frozenset()
        return self._deliver([seen for seen in ready if seen.found.name not in busy])

    def last_look(self, now: float, clean_exit: bool) -> list[Found]:
        """As :meth:`look`, after the trainer has gone: nothing will settle any more, so now is the time to decide.

        A whole torch or safetensors file, a folder that has what its trainer writes last, and whatever was renamed into
        place are taken at once. Content that cannot prove its end is taken only when the trainer left with exit code
        0, when it had been quiet long enough, when a later save had begun after it, or (a folder) when it has the
        same files as an earlier checkpoint.
        """
        self._update(now)
        waiting = sorted(self._candidates(), key=lambda seen: seen.found.newest_mtime)
        busy = open_for_writing([seen.found for seen in waiting], self._proc) if waiting else frozenset()
        reasons, taken = {}, []
        for seen in waiting:  # oldest first: what is taken of the earlier ones speaks for the later ones
            reasons[seen.found.name] = reason = self._doubt(seen, now, clean_exit, busy)
            taken += [] if reason else self._deliver([seen])
        self._refuse(reasons)
        return sorted(taken, key=_by_step)

    def _update(self, now: float) -> None:
        before, self._seen = self._seen, {}
        for name, stats in _entries(self._places, self._format):
            old = before.get(name)
            if old is not None and old.stats == stats:
                self._seen[name] = old
                continue
            found = _found(self._places, name, stats, self._format)
            if old is not None and old.found.signature == found.signature:
                self._seen[name] = _Seen(found, stats, old.since, old.state)
            else:
                self._seen[name] = _Seen(found, stats, now)

    def _candidates(self) -> list[_Seen]:
        """Complete ones that were not decided yet, after the rule about names without a step."""
        complete = [seen.found for seen in self._seen.values() if seen.found.verdict.complete]
        counted = {found.name for found in without_duplicates(complete)}
        return [seen for seen in self._seen.values() if seen.state == "waiting" and seen.found.name in counted]

    def _has_settled(self, seen: _Seen, now: float) -> bool:
        """True when its structure proves its end, or something else does."""
        found = seen.found
        return _is_proved(found) or found.published or now - seen.since >= self._settle_s or self._is_followed(found)

    def _is_followed(self, found: Found) -> bool:
        """A trainer that has begun the next save, all of it after this one, has finished this one."""
        others = (seen.found for seen in self._seen.values() if seen.found.name != found.name)
        newest = max((file.mtime_ns for file in found.files), default=0)
        return any(
            min(file.mtime_ns for file in other.files) > newest
            for other in others
            if other.files and other.verdict.format != "other" and other.is_dir == found.is_dir
        )

    def _doubt(self, seen: _Seen, now: float, clean_exit: bool, busy: Collection[str]) -> str:
        """Why a complete entry must not be taken after the trainer's end; empty when it may be."""
        found = seen.found
        if found.name in busy:
            return "a process still has it open for writing"
        if clean_exit or found.verdict.proof >= Proof.LAST or self._has_settled(seen, now):
            return ""
        if found.is_dir and _shape(found) in self._delivered_shapes:
            return ""
        return "nothing proves that the trainer had finished writing it"

    def _deliver(self, ready: list[_Seen]) -> list[Found]:
        for seen in ready:
            seen.state = "delivered"
            if seen.found.is_dir:
                self._delivered_shapes.add(_shape(seen.found))
        return sorted((seen.found for seen in ready), key=_by_step)

    def _refuse(self, doubts: dict[str, str]) -> None:
        refused = []
        for name, seen in self._seen.items():
            verdict = seen.found.verdict
            reason = doubts.get(name, "") if verdict.complete else verdict.reason
            if seen.state == "waiting" and reason and verdict.format != "other":
                refused.append((name, reason))
            if seen.state == "waiting" and reason:
                seen.state = "refused"
        self._refused = tuple(refused)
        self._doubtful = tuple((name, reason) for name, reason in doubts.items() if reason)


def _is_proved(found: Found) -> bool:
    return found.verdict.proof is Proof.WHOLE


def _by_step(found: Found) -> tuple[int, float]:
    return found.step or 0, found.newest_mtime


def without_duplicates(complete: Collection[Found]) -> list[Found]:
    """Leave out what other entries say better.

    ``last``, ``final`` and the like are copies of a checkpoint whose name tells its step; they count only when nothing
    tells a step, or when they hold a later step than all that do (a trainer that numbers only its best ones).
    ``best`` is not the newest: it counts only when it is alone.
    """
    steps = [found.step for found in complete if found.step is not None and _names_its_step(found)]
    unnamed = [found for found in complete if not _names_its_step(found)]
    if steps:
        unnamed = [found for found in unnamed if found.step is not None and found.step > max(steps)]
    newest = [found for found in unnamed if not _BEST.search(found.path.name)] or unnamed
    return [found for found in complete if _names_its_step(found) or found in newest]


def _names_its_step(found: Found) -> bool:
    return step_of(found.path.name) is not None or (found.is_dir and found.step is not None)


def _shape(found: Found) -> frozenset[str]:
    """The member names of a folder, numbers aside: two saves of one trainer have the same."""
    return frozenset(re.sub(r"\d+", "0", file.path) for file in found.files)


def open_for_writing(founds: Collection[Found], proc: Path = Path("/proc")) -> frozenset[str]:
    """Names of those that some process has open for writing, among the processes that we may look at."""
    owners = dict(_inodes(founds))
    names = {path.rpartition("/")[2] for found in founds for path in (file.path for file in found.files)}
    return frozenset(owners[inode] for inode in _written_inodes(proc, names) if inode in owners)


def _inodes(founds: Collection[Found]) -> Iterator[tuple[tuple[int, int], str]]:
    for found in founds:
        for file in found.files:
            with suppress(OSError):
                status = os.stat(found.path / file.path if found.is_dir else found.path)
                yield (status.st_dev, status.st_ino), found.name


def _written_inodes(proc: Path, names: Collection[str]) -> Iterator[tuple[int, int]]:
    """(device, inode) of each file with one of these base names that is open for writing."""
    for process in (name for name in os.listdir(proc) if name.isdigit()):
        # Processes end, and other users' are closed to us.
        with suppress(OSError):
            for fd in os.listdir(proc / process / "fd"):
                with suppress(OSError):
                    link = proc / process / "fd" / fd
                    # Reading the link never blocks; a stat may, on a dead network mount.
                    if os.readlink(link).rpartition("/")[2] in names and _is_writable(proc / process / "fdinfo" / fd):
                        status = os.stat(link)
                        yield status.st_dev, status.st_ino


def _is_writable(fdinfo: Path) -> bool:
    for line in fdinfo.read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def clear_unfinished(
    folder: Path,
    format: str,  # noqa: A002 (the word of the spec)
    target: Path,
    *,
    keep: int = 3,
) -> list[tuple[str, str]]:
    """Before a start: move what an earlier trainer left unfinished out of the trainer's sight; (name, reason) each.

    Complete checkpoints and files that are not checkpoints are never touched. Our own part files are deleted.
    """
    moved = [(name, "a temporary name, left behind") for name in _leftovers(folder)]
    for found in scan(folder, format):
        broken = not found.verdict.complete and found.verdict.format != "other"
        if broken and looks_like_checkpoint(found.path.name, is_dir=found.is_dir):
            moved.append((found.name, found.verdict.reason))
    set_aside(folder, [name for name, _ in moved], target, keep=keep)
    return moved


def _leftovers(folder: Path) -> list[str]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in filter(is_part, names):
        delete(folder / name)
    return [name for name in names if not is_part(name) and _LEFTOVER.fullmatch(name)]


def set_aside(folder: Path, names: Iterable[str], target: Path, *, keep: int | None = None) -> None:
    """Move what has these names below ``folder`` into ``target``, as ``000001-<name>``.

    With ``keep``, only so many of the newest stay there: for what is not whole.
    """
    names = list(names)
    if not names:
        return
    make_directory(target)
    last = max((_number(name) for name in os.listdir(target)), default=0)
    for number, name in enumerate(names, start=last + 1):
        # A rename within one file system, which the default folders are; else a copy.
        with suppress(FileNotFoundError):
            shutil.move(folder / name, target / _aside_name(number, name))
            sync_directory((folder / name).parent)
    sync_directory(target)
    if keep is not None:
        for name in sorted(filter(_number, os.listdir(target)), key=_number)[:-keep]:
            delete(target / name)


def _aside_name(number: int, name: str) -> str:
    """The end of a path tells most of it, and a name may have 255 bytes."""
    return f"{number:06d}-" + os.fsencode(name.replace("/", "--"))[-240:].decode(errors="ignore")


def _number(name: str) -> int:
    head = name.partition("-")[0]
    return int(head) if head.isascii() and head.isdigit() else 0


def delete(path: Path) -> None:
    """Remove a file, a link or a whole folder; what is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def place_of(path: Path, is_dir: bool, member: str) -> Path:
    """Where a file of a checkpoint lies: a checkpoint of kind ``file`` is that file."""
    return path / member if is_dir else path
