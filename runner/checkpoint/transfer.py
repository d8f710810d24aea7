"""Checkpoints between the local disk and the store.

A checkpoint exists in the store exactly when its manifest does. The manifest is written last and deleted first, so a
process may die at any point and leave nothing that looks like a checkpoint and is none.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from runner.checkpoint.digest import Digest, Digesting, digest
from runner.checkpoint.layout import StoreLayout, parse_checkpoint_id
from runner.checkpoint.local import Found, LocalFile, delete, local_files
from runner.checkpoint.manifest import (
    MAX_BYTES,
    PART_SIZE,
    FileEntry,
    Manifest,
    check_path,
    parse_manifest,
    signature,
    to_bytes,
    to_checkpoint,
)
from runner.checkpoint.twins import Twins
from runner.checkpoint.upload_notes import UploadNotes
from runner.core.state import Checkpoint, age
from runner.errors import (
    CloudrunError,
    CorruptData,
    CredentialsExpired,
    DiskFull,
    ExitCode,
    ObjectExists,
    ObjectMissing,
    SourceChanged,
    StoreError,
    StoreUnreachable,
    UsageError,
)
from runner.files import make_directory, part_path, sync_directory
from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, ignore_bytes
from runner.storage.local import translating

WORKERS = 4
LEFTOVER_AGE_S = 86400.0

TRIES = 2
"""How often a file is fetched whose bytes are wrong: the damage may have happened on the way."""

Halt = Callable[[], bool]
"""True once the work that asks should end early."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class TransferStopped(CloudrunError):
    """Somebody asked the transfer to end early. Nothing was committed, nothing was published."""

    exit_code = ExitCode.PREEMPTED


@dataclass(frozen=True, slots=True)
class Facts:
    """What a manifest says beside the files. ``created_at`` is epoch seconds."""

    created_at: float
    spec_digest: str
    tool_version: str
    host: str
    world_size: int = 1
    epoch: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A committed checkpoint that cannot be used, and why."""

    id: str
    step: int
    reason: str


# ---- many files at once


def _side_by_side(
    work: Callable[[_Item, Halt], _Result], items: Iterable[_Item], workers: int, stop: threading.Event
) -> list[_Result]:
    """``work`` on every item in threads; results in the order of the items.

    The first failure, or ``stop``, makes the others end early; the failure is raised when all have ended.
    """
    failed = threading.Event()

    def halt() -> bool:
        return failed.is_set() or stop.is_set()

    def attempt(item: _Item) -> _Result:
        try:
            _unless(halt)
            return work(item, halt)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="checkpoint") as pool:
        try:
            futures = [pool.submit(attempt, item) for item in items]
            wait(futures)
        finally:
            failed.set()
    return _results(futures, stop)


def _results(futures: list[Future[_Result]], stop: threading.Event) -> list[_Result]:
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # The others only stopped because the first one failed.
    causes = [error for error in errors if not isinstance(error, TransferStopped)]
    if causes:
        raise causes[0]
    if errors or stop.is_set():
        raise TransferStopped("the transfer was stopped")
    return [future.result() for future in futures]


def _unless(halt: Halt) -> None:
    if halt():
        raise TransferStopped("the transfer was stopped")


def _listener(on_bytes: OnBytes, halt: Halt) -> OnBytes:
    """``on_bytes``, which also ends the transfer that calls it when ``halt`` says so."""

    def moved(count: int) -> None:
        _unless(halt)
        on_bytes(count)

    return moved


# ---- upload


def upload(
    store: ObjectStore,
    layout: StoreLayout,
    run: int,
    checkpoint_id: str,
    found: Found,
    *,
    facts: Facts,
    earlier: Sequence[Manifest] = (),
    notes: UploadNotes | None = None,
    workers: int = WORKERS,
    on_bytes: OnBytes = ignore_bytes,
    stop: threading.Event,
) -> Manifest:
    """Commit a complete local checkpoint. Files first, side by side; the manifest last.

    Files that are the same in the newest of the run's ``earlier`` checkpoints are copied inside the store.
    With ``notes``, a call for the same id and files goes on where a process that died has come to.
    What is committed already under this id, by a try whose answer was lost, is left as it is.
    Raises SourceChanged, and commits nothing, when the files are not, or do not stay, those of ``found``;
    ObjectExists when other files are committed under this id; TransferStopped; the store's errors.
    """
    prefix = layout.checkpoint_prefix(run, checkpoint_id)
    there = {info.key: info for info in store.list(prefix)}
    if layout.manifest(run, checkpoint_id) in there:
        return _committed_before(store, layout, run, checkpoint_id, found)
    with _undone_on_failure(store, [prefix + file.path for file in found.files]):
        before = _snapshot(found)
        sending = _Sending(store, prefix, found, Twins(layout, run, earlier), notes, there, on_bytes)
        largest_first = sorted(found.files, key=lambda file: file.size, reverse=True)
        entries = _side_by_side(sending.send, largest_first, workers, stop)
        _check_unchanged(found, before)
    manifest = _manifest(layout.job, run, checkpoint_id, found, facts, _in_order_of(found, entries))
    _check_arrived(store, prefix, manifest)
    _commit(store, layout.manifest(run, checkpoint_id), to_bytes(manifest))
    return manifest


def _check_arrived(store: ObjectStore, prefix: str, manifest: Manifest) -> None:
    """A look at the store just before the commit: what was sent an hour ago may have been swept meanwhile."""
    there = {info.key: info.size for info in store.list(prefix)}
    gone = [file.path for file in manifest.files if there.get(prefix + file.path) != file.size]
    if gone:
        raise StoreUnreachable(f"{prefix}{gone[0]} is not in the store any more, although it was sent")


def _committed_before(store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str, found: Found) -> Manifest:
    manifest = read_manifest(store, layout, run, checkpoint)
    if signature(manifest.files) != found.signature:
        raise ObjectExists(f"{checkpoint} is stored already, with other files")
    return manifest


def _in_order_of(found: Found, entries: list[FileEntry]) -> tuple[FileEntry, ...]:
    by_path = {entry.path: entry for entry in entries}
    return tuple(by_path[file.path] for file in found.files)


@contextmanager
def _undone_on_failure(store: ObjectStore, keys: list[str]) -> Iterator[None]:
    """Remove what was written when the checkpoint itself is no good. Where the store is the trouble it would only take
    longer; and what was merely stopped is gone on with, or swept in the end.
    """
    try:
        yield
    except (SourceChanged, CorruptData):
        with suppress(CloudrunError):
            store.delete(keys)
        raise


def _check_unchanged(found: Found, before: tuple[tuple[LocalFile, int], ...]) -> None:
    if _snapshot(found) != before:
        raise SourceChanged(f"{found.path} changed while it was uploaded")


def _snapshot(found: Found) -> tuple[tuple[LocalFile, int], ...]:
    """Every file of the checkpoint as it is now; raises SourceChanged when it is not the one that was found."""
    try:
        files = local_files(found.path)
    except OSError as error:
        raise SourceChanged(f"{found.path} has gone or cannot be read: {error.strerror}") from error
    if tuple(file for file, _ in files) != found.files:
        raise SourceChanged(f"{found.path} changed since it was judged")
    return files


@dataclass(frozen=True, slots=True)
class _Sending:
    """Brings the files of one checkpoint into the store, each by the cheapest way that is sure."""

    store: ObjectStore
    prefix: str
    found: Found
    twins: Twins
    notes: UploadNotes | None
    there: Mapping[str, ObjectInfo]
    on_bytes: OnBytes

    def send(self, file: LocalFile, halt: Halt) -> FileEntry:
        source, key = _place(self.found.path, self.found.is_dir, file.path), self.prefix + file.path
        done = self.notes.done(key, source, self.there.get(key)) if self.notes is not None else None
        if done is not None:
            return _entry(file, done)
        return _entry(file, self._copy(file, source, key, halt) or self._upload(file, source, key, halt))

    def _copy(self, file: LocalFile, source: Path, key: str, halt: Halt) -> Digest | None:
        """Inside the store, from an earlier checkpoint; None where that is not to be had."""
        twin = self.twins.of(file)
        if twin is None:
            return None
        sums = digest(source, halt=lambda: _unless(halt))
        if sums.blake3 != twin.blake3:
            return None
        try:
            copied = self.store.copy(twin.key, key)
        except CredentialsExpired:
            raise
        except StoreError:
            # Whatever speaks against copying (it was pruned, lies in an archive, may not be read): it can be sent.
            return None
        return sums if copied.size == file.size else None

    def _upload(self, file: LocalFile, source: Path, key: str, halt: Halt) -> Digest:
        reading = Digesting()
        note = self.notes.under_way(key) if self.notes is not None else None
        sent = self.store.upload(source, key, on_bytes=_listener(self.on_bytes, halt), sink=reading.begin, note=note)
        sums = reading.result()
        if sent.size != file.size:
            raise SourceChanged(f"{source} changed while it was uploaded")
        if self.notes is not None:
            self.notes.note_done(key, source, sent, sums)
        return sums


def _entry(file: LocalFile, sums: Digest) -> FileEntry:
    return FileEntry(file.path, file.size, file.mtime_ns, sums.blake3, PART_SIZE, sums.crc32c)


def _place(path: Path, is_dir: bool, member: str) -> Path:
    """Where a file of a checkpoint lies: a checkpoint of kind ``file`` is that file."""
    return path / member if is_dir else path


def _manifest(
    job: str, run: int, checkpoint: str, found: Found, facts: Facts, files: tuple[FileEntry, ...]
) -> Manifest:
    name = parse_checkpoint_id(checkpoint)
    assert name is not None
    return Manifest(
        job=job,
        run=run,
        attempt=name.attempt,
        attempt_id=name.attempt_id,
        id=checkpoint,
        step=name.step,
        name=found.name,
        kind="folder" if found.is_dir else "file",
        format=found.verdict.format,
        created_at=facts.created_at,
        spec_digest=facts.spec_digest,
        world_size=facts.world_size,
        tool_version=facts.tool_version,
        host=facts.host,
        environment=dict(facts.environment),
        files=files,
        epoch=facts.epoch,
    )


def _commit(store: ObjectStore, key: str, data: bytes) -> None:
    """Write the manifest. When the outcome is unknown the files stay: without a manifest they are only garbage."""
    try:
        store.write(key, data, only_new=True)
    except ObjectExists:
        # A retry after a lost answer meets its own first try.
        if store.read(key) != data:
            raise


# ---- listing


def list_stored(
    store: ObjectStore, layout: StoreLayout, run: int, *, workers: int = WORKERS
) -> list[Checkpoint | Unreadable]:
    """The committed checkpoints of a run, best first.

    From one listing, and one read per manifest: a checkpoint with missing or short objects is told as Unreadable
    without a download. Errors of the store itself are raised.
    """
    objects = _by_checkpoint(store, layout, run)
    committed = [name for name in objects if layout.manifest(run, name) in objects[name]]

    def work(name: str, _halt: Halt) -> Checkpoint | Unreadable | None:
        return _examine(store, layout, run, name, objects[name])

    told = [one for one in _side_by_side(work, committed, workers, threading.Event()) if one is not None]
    return sorted(told, key=lambda one: age(one) if isinstance(one, Checkpoint) else (0, one.step, 0.0), reverse=True)


def _by_checkpoint(store: ObjectStore, layout: StoreLayout, run: int) -> dict[str, dict[str, ObjectInfo]]:
    """Checkpoint id -> key -> object. Foreign keys are left out."""
    groups: dict[str, dict[str, ObjectInfo]] = {}
    for info in store.list(layout.checkpoints_prefix(run)):
        parsed = layout.parse_checkpoint_key(run, info.key)
        if parsed is not None:
            groups.setdefault(parsed.id, {})[info.key] = info
    return groups


def _examine(
    store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str, objects: Mapping[str, ObjectInfo]
) -> Checkpoint | Unreadable | None:
    """None when it was removed since the listing."""
    if objects[layout.manifest(run, checkpoint)].size > MAX_BYTES:
        return _unreadable(checkpoint, "bad manifest: it is absurdly large")
    try:
        manifest = read_manifest(store, layout, run, checkpoint)
        _check_sizes(manifest, layout.checkpoint_prefix(run, checkpoint), objects)
    except ObjectMissing:
        return None
    except CorruptData as error:
        return _unreadable(checkpoint, error.message)
    return to_checkpoint(manifest)


def _unreadable(checkpoint: str, reason: str) -> Unreadable:
    name = parse_checkpoint_id(checkpoint)
    return Unreadable(checkpoint, name.step if name else 0, reason)


def _check_sizes(manifest: Manifest, prefix: str, objects: Mapping[str, ObjectInfo]) -> None:
    for file in manifest.files:
        info = objects.get(prefix + file.path)
        if info is None:
            raise CorruptData(f"{file.path} is missing in the store")
        if info.size != file.size:
            raise CorruptData(f"{file.path} has {info.size} bytes in the store, its manifest says {file.size}")


def read_manifest(store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str) -> Manifest:
    """Raises ObjectMissing where there is none, CorruptData where it is bad or another checkpoint's."""
    manifest = parse_manifest(store.read(layout.manifest(run, checkpoint)))
    if (manifest.job, manifest.run, manifest.id) != (layout.job, run, checkpoint):
        raise CorruptData(f"bad manifest: it is of {manifest.job}, run {manifest.run}, {manifest.id}")
    return manifest


# ---- restore


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
        kept = _side_by_side(fetch.bring, _largest_first(manifest), workers, stop)
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
        place = _place(self.part, self.manifest.kind == "folder", file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        local = _place(self.target, self.manifest.kind == "folder", file.path)
        if self._is_plain(local) and _matches(local, file, halt):
            _link_or_copy(local, place)
            return True
        for _ in range(TRIES):
            self.store.download(self.prefix + file.path, place, on_bytes=_listener(self.on_bytes, halt))
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
            and digest(path, file.part_size, lambda: _unless(halt)).blake3 == file.blake3
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
    found = digest(path, file.part_size, lambda: _unless(halt))
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
        place = _place(root, is_folder, file.path)
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


# ---- proof and removal


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
                store.download(prefix + file.path, copy, on_bytes=_listener(on_bytes, halt))
            except ObjectMissing:
                return f"{file.path} is missing in the store"
            except DiskFull as error:
                raise DiskFull(error.message, "set TMPDIR to a folder on a larger disk") from error
            return _problem(copy, file, halt)

    problems = _side_by_side(work, manifest.files, workers, stop or threading.Event())
    return [problem for problem in problems if problem]


def sweep(store: ObjectStore, layout: StoreLayout, run: int, now: float) -> None:
    """Delete the files of uploads that were never committed, once all of them are a day old.

    ``now`` is epoch seconds. Younger ones stay: another machine's upload may be going on.
    """
    store.sweep(layout.run_prefix(run), now - LEFTOVER_AGE_S)
    for checkpoint, objects in _by_checkpoint(store, layout, run).items():
        old = all(now - info.modified > LEFTOVER_AGE_S for info in objects.values())
        if old and not _is_committed(store, layout, run, checkpoint):
            store.delete(sorted(objects))


def _is_committed(store: ObjectStore, layout: StoreLayout, run: int, checkpoint: str) -> bool:
    """Asked just before a deletion: the listing may be old by now."""
    try:
        store.read(layout.manifest(run, checkpoint))
    except ObjectMissing:
        return False
    return True


def remove(store: ObjectStore, layout: StoreLayout, run: int, ids: Iterable[str]) -> None:
    """Delete checkpoints: all manifests first, then the files. A death in between leaves only garbage."""
    ids = list(ids)
    store.delete([layout.manifest(run, checkpoint) for checkpoint in ids])
    for checkpoint in ids:
        store.delete([info.key for info in store.list(layout.checkpoint_prefix(run, checkpoint))])
