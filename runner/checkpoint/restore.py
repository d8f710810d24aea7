"""From the store to the disk, every byte verified: to resume from, for people, or only to see whether it is sound."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.digest import digest
from runner.checkpoint.layout import StoreLayout
from runner.checkpoint.local import delete, local_files, place_of
from runner.checkpoint.manifest import (
    FileEntry,
    Manifest,
    check_path,
)
from runner.checkpoint.side_by_side import WORKERS, Halt, listener, side_by_side, unless
from runner.checkpoint.stored import read_manifest
from runner.core.state import Checkpoint
from runner.errors import (
    CorruptData,
    DiskFull,
    ObjectMissing,
    SourceChanged,
    StoreError,
    UsageError,
)
from runner.files import make_directory, part_path, sync_directory
from runner.storage.api import ObjectStore, OnBytes, ignore_bytes
from runner.storage.local import translating

TRIES = 2
"""How often a file is fetched whose bytes are wrong: the damage may have happened on the way."""


def restore(
    store: ObjectStore,
    layout: StoreLayout,
    run: int,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    workers: int = WORKERS,
    on_bytes: OnBytes = ignore_bytes,
    stop: threading.Event,
) -> Path:
    """Bring a checkpoint to ``folder`` under the trainer's own name; every byte is verified before it is published.

    Files that lie there with the right content are kept. A local entry of the same name is replaced only when the
    new one is complete, durable and in one piece. Modification times are those of the manifest, set oldest first.
    Raises CorruptData naming the file and the part; ObjectMissing, DiskFull, TransferStopped.
    """
    manifest = read_manifest(store, layout, run, checkpoint.id)
    target = _safe_target(folder, manifest.name)
    part = part_path(target)
    with translating(str(target), room=(folder, manifest.bytes)), _discarded(part):
        fetch = _Fetch(store, layout.checkpoint_prefix(run, checkpoint.id), manifest, target, part, on_bytes)
        kept = side_by_side(fetch.bring, _largest_first(manifest), workers, stop)
        if not all(kept) or not fetch.is_exact():
            _finish(manifest, part)
            _replace(part, target)
        else:
            _set_times(manifest, target)
    return target


def pull(
    store: ObjectStore,
    layout: StoreLayout,
    run: int,
    checkpoint: Checkpoint,
    to: Path,
    *,
    workers: int = WORKERS,
    on_bytes: OnBytes = ignore_bytes,
    stop: threading.Event,
) -> Path:
    """A verified copy of a checkpoint in any folder, for people; see :func:`restore`.

    Raises UsageError where its name is taken by what holds other files: those may be somebody's only copy.
    """
    manifest = read_manifest(store, layout, run, checkpoint.id)
    target = to / manifest.name
    if os.path.lexists(target) and not target.is_symlink():
        with translating(str(target)):
            foreign = {file.path for file, _ in local_files(target)} - {file.path for file in manifest.files}
        if foreign:
            raise UsageError(
                f"{target} exists and holds files that {checkpoint.id} has not, such as {min(foreign)}",
                "choose another folder, or move it away",
            )
    return restore(store, layout, run, checkpoint, to, workers=workers, on_bytes=on_bytes, stop=stop)


def _largest_first(manifest: Manifest) -> list[FileEntry]:
    return sorted(manifest.files, key=lambda file: file.size, reverse=True)


def _safe_target(folder: Path, name: str) -> Path:
    """``folder/name``, whose parent exists and really is inside ``folder``, whatever links lie there."""
    make_directory(folder)
    target = folder / check_path(name)
    parent = folder
    for segment in name.split("/")[:-1]:
        parent = parent / segment
        if parent.is_symlink():
            raise CorruptData(f"{parent} is a link: {name} would be written outside of {folder}")
        make_directory(parent)
    return target


@contextmanager
def _discarded(part: Path) -> Iterator[None]:
    """Whatever is left under the name ``part`` at the end goes."""
    try:
        yield
    finally:
        delete(part)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Builds a checkpoint under the name ``part``, from what already lies at ``target`` and from the store."""

    store: ObjectStore
    prefix: str
    manifest: Manifest
    target: Path
    part: Path
    on_bytes: OnBytes

    def bring(self, file: FileEntry, halt: Halt) -> bool:
        """Put one verified file into place below ``part``; True when the local one was kept."""
        place = place_of(self.part, self.manifest.kind == "folder", file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        local = place_of(self.target, self.manifest.kind == "folder", file.path)
        if self._is_plain(local) and _matches(local, file, halt):
            _link_or_copy(local, place)
            return True
        for _ in range(TRIES):
            self.store.download(self.prefix + file.path, place, on_bytes=listener(self.on_bytes, halt))
            problem = _problem(place, file, halt)
            if not problem:
                _sync(place)
                return False
        raise CorruptData(f"{self.manifest.id}: {problem}")

    def is_exact(self) -> bool:
        """True when the local entry has the manifest's files and no others."""
        try:
            if stat.S_ISDIR(os.lstat(self.target).st_mode) != (self.manifest.kind == "folder"):
                return False
            local = {file.path for file, _ in local_files(self.target)}
        except OSError:
            return False
        return local == {file.path for file in self.manifest.files}

    def _is_plain(self, local: Path) -> bool:
        """A regular file that no link on the way leads to."""
        try:
            regular = stat.S_ISREG(os.lstat(local).st_mode)
        except OSError:
            return False
        inside = os.path.realpath(self.target.parent) + os.sep + os.path.relpath(local, self.target.parent)
        return regular and os.path.realpath(local) == inside


def _matches(path: Path, file: FileEntry, halt: Halt) -> bool:
    with suppress(SourceChanged, StoreError):
        return (
            path.stat().st_size == file.size
            and digest(path, file.part_size, lambda: unless(halt)).blake3 == file.blake3
        )
    return False


def _link_or_copy(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:
        # Some file systems have no hard links.
        shutil.copyfile(source, place)
        _sync(place)


def _problem(path: Path, file: FileEntry, halt: Halt) -> str:
    """What is wrong with a downloaded file; empty when nothing is."""
    size = path.stat().st_size
    if size != file.size:
        return f"{file.path} has {size} bytes, its manifest says {file.size}"
    found = digest(path, file.part_size, lambda: unless(halt))
    for number, (got, due) in enumerate(zip(found.crc32c, file.crc32c, strict=True)):
        if got != due:
            end = min((number + 1) * file.part_size, file.size)
            return f"{file.path} is damaged in part {number + 1} (bytes {number * file.part_size} to {end})"
    return "" if found.blake3 == file.blake3 else f"{file.path} is damaged: its blake3 digest does not match"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _finish(manifest: Manifest, part: Path) -> None:
    """Times and durability of what was built, before it gets its name."""
    _set_times(manifest, part)
    if manifest.kind == "folder":
        for folder, _, _ in os.walk(part, topdown=False):
            sync_directory(Path(folder))


def _set_times(manifest: Manifest, root: Path) -> None:
    """Modification times from the manifest; a folder gets its newest file's.

    Trainers sort by them, some by the times of the last change, which follow the order set here: oldest first.
    """
    is_folder = manifest.kind == "folder"
    for file in sorted(manifest.files, key=lambda file: (file.mtime_ns, file.path)):
        place = place_of(root, is_folder, file.path)
        if place.stat().st_mtime_ns != file.mtime_ns:
            os.utime(place, ns=(file.mtime_ns, file.mtime_ns))
        _sync(place)
    if is_folder:
        newest = max(file.mtime_ns for file in manifest.files)
        os.utime(root, ns=(newest, newest))


def _replace(part: Path, target: Path) -> None:
    """Give ``part`` the name ``target``. Whatever has that name steps aside first, and goes when that is done."""
    old = part_path(target)
    # A file replaces a file or a link in one step; a folder replaces nothing.
    if part.is_dir() or (target.is_dir() and not target.is_symlink()):
        with suppress(FileNotFoundError):
            os.rename(target, old)
    try:
        os.rename(part, target)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    delete(old)


def verify(
    store: ObjectStore,
    layout: StoreLayout,
    run: int,
    checkpoint: Checkpoint,
    *,
    workers: int = WORKERS,
    on_bytes: OnBytes = ignore_bytes,
    stop: threading.Event | None = None,
) -> list[str]:
    """Read every byte of a stored checkpoint; what is wrong with it, one line each. Keeps nothing.

    Needs room for ``workers`` files in the system's temporary folder; DiskFull where there is none.
    """
    try:
        manifest = read_manifest(store, layout, run, checkpoint.id)
    except (CorruptData, ObjectMissing) as error:
        return [error.message]
    prefix = layout.checkpoint_prefix(run, checkpoint.id)

    def work(file: FileEntry, halt: Halt) -> str:
        with tempfile.TemporaryDirectory(prefix="cloudrun-verify-") as room:
            copy = Path(room) / "file"
            try:
                store.download(prefix + file.path, copy, on_bytes=listener(on_bytes, halt))
            except ObjectMissing:
                return f"{file.path} is missing in the store"
            except DiskFull as error:
                raise DiskFull(error.message, "set TMPDIR to a folder on a larger disk") from error
            return _problem(copy, file, halt)

    problems = side_by_side(work, manifest.files, workers, stop or threading.Event())
    return [problem for problem in problems if problem]
