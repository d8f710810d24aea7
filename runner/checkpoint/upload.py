"""A complete local checkpoint into the store: files first, the manifest last."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.checkpoint.digest import Digest, Digesting, digest
from runner.checkpoint.layout import StoreLayout, parse_checkpoint_id
from runner.checkpoint.local import Found, LocalFile, local_files, place_of
from runner.checkpoint.manifest import (
    PART_SIZE,
    FileEntry,
    Manifest,
    signature,
    to_bytes,
)
from runner.checkpoint.side_by_side import WORKERS, Halt, listener, side_by_side, unless
from runner.checkpoint.stored import check_sizes, read_manifest
from runner.checkpoint.twins import Twins
from runner.checkpoint.upload_notes import UploadNotes
from runner.errors import (
    CloudrunError,
    CorruptData,
    CredentialsExpired,
    ObjectExists,
    SourceChanged,
    StoreError,
    StoreUnreachable,
)
from runner.storage.api import ObjectInfo, ObjectStore, OnBytes, ignore_bytes


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
    metrics: Mapping[str, float] = field(default_factory=dict)


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
        entries = side_by_side(sending.send, largest_first, workers, stop)
        _check_unchanged(found, before)
    manifest = _manifest(layout.job, run, checkpoint_id, found, facts, _in_order_of(found, entries))
    _check_arrived(store, prefix, manifest)
    _commit(store, layout.manifest(run, checkpoint_id), to_bytes(manifest))
    return manifest


def _check_arrived(store: ObjectStore, prefix: str, manifest: Manifest) -> None:
    """A look at the store just before the commit: what was sent an hour ago may have been swept meanwhile."""
    try:
        check_sizes(manifest, prefix, {info.key: info for info in store.list(prefix)})
    except CorruptData as error:
        raise StoreUnreachable(f"{error}, although it was sent") from None


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
        source, key = place_of(self.found.path, self.found.is_dir, file.path), self.prefix + file.path
        done = self.notes.done(key, source, self.there.get(key)) if self.notes is not None else None
        if done is not None:
            return _entry(file, done)
        return _entry(file, self._copy(file, source, key, halt) or self._upload(file, source, key, halt))

    def _copy(self, file: LocalFile, source: Path, key: str, halt: Halt) -> Digest | None:
        """Inside the store, from an earlier checkpoint; None where that is not to be had."""
        twin = self.twins.of(file)
        if twin is None:
            return None
        sums = digest(source, halt=lambda: unless(halt))
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
        sent = self.store.upload(source, key, on_bytes=listener(self.on_bytes, halt), sink=reading.begin, note=note)
        sums = reading.result()
        if sent.size != file.size:
            raise SourceChanged(f"{source} changed while it was uploaded")
        if self.notes is not None:
            self.notes.note_done(key, source, sent, sums)
        return sums


def _entry(file: LocalFile, sums: Digest) -> FileEntry:
    return FileEntry(file.path, file.size, file.mtime_ns, sums.blake3, PART_SIZE, sums.crc32c)


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
        metrics=dict(facts.metrics),
    )


def _commit(store: ObjectStore, key: str, data: bytes) -> None:
    """Write the manifest. When the outcome is unknown the files stay: without a manifest they are only garbage."""
    try:
        store.write(key, data, only_new=True)
    except ObjectExists:
        # A retry after a lost answer meets its own first try.
        if store.read(key) != data:
            raise
