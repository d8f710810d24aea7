"""What is not sent: files that an earlier checkpoint has, and what a process that died had sent already."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from runner.checkpoint.digest import digest
from runner.checkpoint.layout import StoreLayout, checkpoint_id
from runner.checkpoint.local import Found, scan
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.restore import restore
from runner.checkpoint.stored import list_stored
from runner.checkpoint.twins import CHEAP_TO_READ
from runner.checkpoint.upload import Facts, upload
from runner.checkpoint.upload_notes import UploadNotes
from runner.core.state import Checkpoint
from runner.errors import StoreUnreachable
from runner.storage.bucket_store import PROBE, BucketStore
from runner.storage.retrying import Retry
from runner.storage.upload import PART
from tests.storage.memory_bucket import MemoryBucket

LAYOUT = StoreLayout("digits")
FACTS = Facts(1.7e9, "spec", "0.1", "box")
NEVER = threading.Event()
LARGE = CHEAP_TO_READ + PART


class Machine:
    """A checkpoint folder, a bucket, and what was asked of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "checkpoints"
        self.bucket = MemoryBucket(self._count)
        self.asked = Counter[str]()
        self.dies_after: int | None = None
        self.notes = UploadNotes(tmp_path / "notes")

    def _count(self, request: str, key: str) -> None:
        if PROBE in key:
            return
        if request in ("put", "put_part") and self.dies_after is not None:
            if not self.dies_after:
                raise KilledError
            self.dies_after -= 1
        self.asked[request] += 1

    def found(self, name: str, files: dict[str, bytes]) -> Found:
        for path, data in files.items():
            place = self.folder / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        return next(one for one in scan(self.folder, "any") if one.name == name)

    def upload(self, found: Found, step: int, earlier: tuple[Manifest, ...] = ()) -> Manifest:
        self.asked.clear()
        store = BucketStore(self.bucket, "", Retry(5, sleep=lambda _: None))
        name = checkpoint_id(step, 1, "abcdef")
        self.notes.begin(1, found.signature, name)
        manifest = upload(
            store, LAYOUT, 1, name, found, facts=FACTS, earlier=earlier, notes=self.notes, workers=1, stop=NEVER
        )
        self.notes.end()
        return manifest

    def restored(self, step: int, to: Path) -> dict[str, bytes]:
        store = BucketStore(self.bucket, "", Retry(5))
        [one] = [one for one in list_stored(store, LAYOUT, 1) if isinstance(one, Checkpoint) and one.step == step]
        path = restore(store, LAYOUT, 1, one, to, stop=NEVER)
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class KilledError(BaseException):
    """As if by SIGKILL: nothing is tidied up."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_small_files_that_are_the_same_again_are_copied_in_the_store(machine: Machine, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.bin": b"m" * 1000}
    first = machine.upload(machine.found("checkpoint-1", files), 1)
    changed = {**files, "model.bin": b"n" * 1000}
    machine.upload(machine.found("checkpoint-2", changed), 2, (first,))
    assert machine.asked["copy"] == 1
    assert machine.asked["put"] == 1 + 1 + 1  # the model, what a copy does here, the manifest
    assert machine.restored(2, tmp_path / "restored") == changed


def test_large_files_are_looked_at_when_they_were_not_written_anew_or_were_the_same_last_time(machine: Machine) -> None:
    data = os.urandom(LARGE)
    found = [machine.found(f"checkpoint-{step}", {"base.bin": data}) for step in (1, 2, 3, 4)]
    first = machine.upload(found[0], 1)
    second = machine.upload(found[1], 2, (first,))
    assert (machine.asked["copy"], machine.asked["put_part"]) == (0, 2)
    third = machine.upload(found[2], 3, (second, first))
    assert (machine.asked["copy"], machine.asked["put_part"]) == (1, 0)
    os.utime(machine.folder / "checkpoint-4" / "base.bin", ns=(0, third.files[0].mtime_ns))
    machine.upload(machine.found("checkpoint-4", {}), 4, (third,))
    assert (machine.asked["copy"], machine.asked["put_part"]) == (1, 0)


def test_a_file_that_only_looks_the_same_is_sent(machine: Machine, tmp_path: Path) -> None:
    first = machine.upload(machine.found("checkpoint-1", {"a": b"one"}), 1)
    found = machine.found("checkpoint-2", {"a": b"two"})
    os.utime(found.path / "a", ns=(0, first.files[0].mtime_ns))
    machine.upload(machine.found("checkpoint-2", {}), 2, (first,))
    assert machine.asked["copy"] == 0
    assert machine.restored(2, tmp_path / "restored") == {"a": b"two"}


def test_a_twin_that_has_gone_meanwhile_is_sent(machine: Machine, tmp_path: Path) -> None:
    first = machine.upload(machine.found("checkpoint-1", {"a": b"same"}), 1)
    machine.bucket.objects.clear()
    machine.upload(machine.found("checkpoint-2", {"a": b"same"}), 2, (first,))
    assert machine.restored(2, tmp_path / "restored") == {"a": b"same"}


@pytest.mark.parametrize("dies_after", range(1, 8))
def test_after_a_crash_only_the_rest_is_sent(machine: Machine, tmp_path: Path, dies_after: int) -> None:
    files = {"a.bin": os.urandom(3 * PART), "b.bin": os.urandom(2 * PART), "c.bin": b"small", "d.bin": b"tiny"}
    found = machine.found("checkpoint-1", files)
    machine.dies_after = dies_after
    with pytest.raises(KilledError):
        machine.upload(found, 1)
    machine.dies_after = None
    assert machine.notes.id_for(1, found.signature) == checkpoint_id(1, 1, "abcdef")
    machine.upload(found, 1)
    sent = machine.asked["put"] + machine.asked["put_part"]
    # Parts that were on their way in other threads when it died may have arrived without a note of it.
    assert 8 - dies_after <= sent <= 8 - dies_after + 1
    assert machine.restored(1, tmp_path / "restored") == files
    assert machine.bucket.uploads == {}
    assert not machine.notes.folder.exists()


def test_notes_of_other_files_are_of_no_use(machine: Machine, tmp_path: Path) -> None:
    machine.dies_after = 1
    with pytest.raises(KilledError):
        machine.upload(machine.found("checkpoint-1", {"a.bin": os.urandom(3 * PART)}), 1)
    machine.dies_after = None
    files = {"a.bin": os.urandom(3 * PART)}
    found = machine.found("checkpoint-1", files)
    assert machine.notes.id_for(1, found.signature) is None
    machine.upload(found, 1)
    assert machine.asked["put_part"] == 3
    assert machine.restored(1, tmp_path / "restored") == files


def test_the_digest_on_the_way_is_that_of_a_reading(machine: Machine) -> None:
    for size in [0, 1, PART - 1, PART, PART + 1, 3 * PART + 5]:
        found = machine.found("checkpoint-1", {"a": os.urandom(size)})
        [entry] = machine.upload(found, 1).files
        assert (entry.blake3, entry.crc32c) == digest(found.path / "a")
        machine.bucket.objects.clear()


def test_what_was_swept_before_the_commit_is_not_committed(machine: Machine, tmp_path: Path) -> None:
    files = {"a.bin": b"a" * 1000, "b.bin": b"b" * 1000}
    found = machine.found("checkpoint-1", files)
    machine.dies_after = 1
    with pytest.raises(KilledError):
        machine.upload(found, 1)
    machine.dies_after = None
    kept = machine._count

    def sweep_once(request: str, key: str) -> None:
        if request == "put" and key.endswith(".bin"):
            for old in [old for old in machine.bucket.objects if old.endswith(".bin")]:
                del machine.bucket.objects[old]
            machine.bucket.hook = kept

    machine.bucket.hook = sweep_once
    with pytest.raises(StoreUnreachable):
        machine.upload(found, 1)
    machine.upload(found, 1)
    assert machine.restored(1, tmp_path / "restored") == files


def test_a_file_of_the_same_size_and_time_that_is_another_one_is_not_done(machine: Machine, tmp_path: Path) -> None:
    source, notes = tmp_path / "source", UploadNotes(tmp_path / "own-notes")
    source.write_bytes(b"one")
    sent = machine.bucket.put("k", b"one")
    notes.begin(1, "signature", checkpoint_id(1, 1, "abcdef"))
    notes.note_done("k", source, sent, digest(source))
    assert notes.done("k", source, sent) == digest(source)
    assert notes.done("k", source, None) is None
    assert notes.done("k", source, machine.bucket.put("k", b"two")) is None
    before = source.stat()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(source)
    assert notes.done("k", source, sent) is None
