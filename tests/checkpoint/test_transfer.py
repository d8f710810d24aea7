"""Upload, listing, restore, proof and removal: what was committed comes back, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.digest import digest
from runner.checkpoint.layout import StoreLayout, checkpoint_id
from runner.checkpoint.local import Found, Shelf, scan
from runner.checkpoint.manifest import PART_SIZE, parse_manifest
from runner.checkpoint.restore import pull, restore, verify
from runner.checkpoint.side_by_side import TransferStopped
from runner.checkpoint.stored import Unreadable, list_stored, remove, sweep
from runner.checkpoint.upload import Facts, upload
from runner.core.state import Checkpoint
from runner.errors import CorruptData, ObjectExists, ObjectMissing, SourceChanged, StoreUnreachable, UsageError
from runner.storage.api import ObjectInfo, ObjectStore
from runner.storage.folder import FolderStore
from runner.storage.memory import Fault, MemoryStore
from runner.storage.passing import PassingStore

Put = Callable[[str, bytes | dict[str, bytes]], Path]

LAYOUT = StoreLayout("digits")
FACTS = Facts(1.7e9, "spec", "0.1", "box", environment={"OMP_NUM_THREADS": "2"})
NEVER = threading.Event()
STEP_5 = checkpoint_id(5, 1, "abcdef")
BIG = bytes(range(256)) * (PART_SIZE // 256) + b"and a second part"
MEMBERS = {"model.bin": b"m" * 5000, "deep/er/optim.bin": b"o" * 3000, "empty": b"", "note ü.txt": b"hello"}


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")


class Counting(PassingStore):
    """A store that counts what passes, and calls ``on_upload`` before each upload."""

    def __init__(self, inner: ObjectStore, on_upload: Callable[[str], None] = lambda key: None) -> None:
        super().__init__(inner)
        self.on_upload = on_upload
        self.calls = Counter[str]()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.calls["list"] += 1
        return super().list(prefix)

    def read(self, key: str) -> bytes:
        self.calls["read"] += 1
        return super().read(key)

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        self.calls["copy"] += 1
        return super().copy(source, key, version=version)

    def download(self, key: str, target: Path, **options: Any) -> None:
        self.calls["download"] += 1
        super().download(key, target, **options)

    def upload(self, source: Path, key: str, **options: Any) -> ObjectInfo:
        self.calls["upload"] += 1
        self.on_upload(key)
        return super().upload(source, key, **options)


def keys(store: ObjectStore) -> list[str]:
    return sorted(info.key for info in store.list())


def commit(store: ObjectStore, found: Found, step: int = 5, attempt: int = 1) -> Checkpoint:
    """Upload, and what a listing says of it."""
    name = checkpoint_id(step, attempt, "abcdef")
    upload(store, LAYOUT, 1, name, found, facts=FACTS, stop=NEVER)
    (checkpoint,) = [one for one in list_stored(store, LAYOUT, 1) if one.id == name]
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def only(folder: Path) -> Found:
    (found,) = scan(folder, "any")
    return found


def content(path: Path) -> bytes | dict[str, bytes]:
    if path.is_file():
        return path.read_bytes()
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# ---- there and back


@pytest.mark.parametrize("data", [MEMBERS, BIG, b"x"], ids=["folder", "big", "small"])
def test_there_and_back(store: ObjectStore, in_place: Put, folder: Path, tmp_path: Path, data: bytes) -> None:
    path = in_place("step-5", data)
    for number, file in enumerate([path] if path.is_file() else sorted(path.rglob("*"))):
        os.utime(file, ns=(10**18 + number, 10**18 + number))
    found = only(folder)
    checkpoint = commit(store, found)
    assert (checkpoint.step, checkpoint.name, checkpoint.attempt) == (5, "step-5", 1)
    assert (checkpoint.files, checkpoint.bytes) == (len(found.files), found.bytes)
    assert checkpoint.signature == found.signature

    again = restore(store, LAYOUT, 1, checkpoint, tmp_path / "other", stop=NEVER)
    assert again == tmp_path / "other" / "step-5"
    assert content(again) == data
    assert only(tmp_path / "other").signature == found.signature
    assert os.listdir(tmp_path / "other") == ["step-5"]
    assert verify(store, LAYOUT, 1, checkpoint) == []


def test_what_lies_in_the_store(store: ObjectStore, in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    checkpoint = commit(store, only(folder))
    prefix = f"digits/run-1/checkpoints/{checkpoint.id}/"
    assert keys(store) == sorted(prefix + name for name in [*MEMBERS, "cloudrun-manifest.json"])
    assert store.read(prefix + "note ü.txt") == b"hello"
    manifest = parse_manifest(store.read(prefix + "cloudrun-manifest.json"))
    assert (manifest.job, manifest.run, manifest.attempt, manifest.attempt_id) == ("digits", 1, 1, "abcdef")
    assert (manifest.kind, manifest.name, manifest.environment) == ("folder", "step-5", {"OMP_NUM_THREADS": "2"})
    assert [file.path for file in manifest.files] == sorted(MEMBERS)


def test_progress_counts_every_byte_once(store: ObjectStore, in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    up, down = list[int](), list[int]()
    upload(store, LAYOUT, 1, STEP_5, only(folder), facts=FACTS, on_bytes=up.append, stop=NEVER)
    (checkpoint,) = list_stored(store, LAYOUT, 1)
    assert isinstance(checkpoint, Checkpoint)
    restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", on_bytes=down.append, stop=NEVER)
    assert sum(up) == sum(down) == only(folder).bytes


def test_digests(tmp_path: Path) -> None:
    import blake3
    import crc32c

    (tmp_path / "f").write_bytes(BIG)
    found = digest(tmp_path / "f")
    assert found.blake3 == blake3.blake3(BIG).hexdigest()
    assert found.crc32c == (crc32c.crc32c(BIG[:PART_SIZE]), crc32c.crc32c(BIG[PART_SIZE:]))


# ---- uploads that must not commit


def run_once(pending: list[Callable[[], object]], key: str) -> None:
    """Do what is pending, before the first upload."""
    if pending:
        pending.pop()()


def failing(bad: tuple[str, str], operation: str, key: str, nth: int) -> Fault | None:
    """A plan for the memory store: one operation on one file fails."""
    return Fault(StoreUnreachable("gone")) if bad == (operation, key.rpartition("/")[2]) else None


def test_a_file_that_changes_in_the_middle_commits_nothing(store: ObjectStore, in_place: Put, folder: Path) -> None:
    path = in_place("step-5", MEMBERS)
    changes: list[Callable[[], object]] = [
        lambda: (path / "model.bin").write_bytes(b"M" * 5000),
        lambda: (path / "extra").write_bytes(b"new"),
        (path / "extra").unlink,
        lambda: os.replace(shutil.copy2(path / "model.bin", path.parent / ".copy"), path / "model.bin"),
        lambda: shutil.rmtree(path),
    ]
    for change in changes:
        pending = [change]
        spoiled = Counting(store, partial(run_once, pending))
        with pytest.raises(SourceChanged):
            upload(spoiled, LAYOUT, 1, STEP_5, only(folder), facts=FACTS, workers=1, stop=NEVER)
        assert list_stored(store, LAYOUT, 1) == []
        assert keys(store) == []


def test_what_changed_since_it_was_judged_is_not_sent(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    found = only(folder)
    in_place("step-5", {"model.bin": b"later"})
    store = Counting(MemoryStore())
    with pytest.raises(SourceChanged):
        upload(store, LAYOUT, 1, STEP_5, found, facts=FACTS, stop=NEVER)
    assert keys(store) == []


def test_a_committed_id_is_left_alone(store: ObjectStore, in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    checkpoint = commit(store, only(folder))
    in_place("step-5", {"model.bin": b"other"})
    with pytest.raises(ObjectExists):
        upload(store, LAYOUT, 1, checkpoint.id, only(folder), facts=FACTS, stop=NEVER)
    assert content(restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", stop=NEVER)) == MEMBERS


def test_stop_ends_an_upload_early(store: ObjectStore, in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    stop = threading.Event()

    def stop_and_wait(key: str) -> None:
        stop.set()
        time.sleep(0.3)

    slow = Counting(store, stop_and_wait)
    with pytest.raises(TransferStopped):
        upload(slow, LAYOUT, 1, STEP_5, only(folder), facts=FACTS, workers=1, stop=stop)
    assert keys(store) == []


def test_a_failure_is_told_and_leaves_no_checkpoint(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    for bad in [("upload", "model.bin"), ("upload", "empty"), ("write", "cloudrun-manifest.json")]:
        store = MemoryStore(partial(failing, bad))
        with pytest.raises(StoreUnreachable, match="gone"):
            upload(store, LAYOUT, 1, STEP_5, only(folder), facts=FACTS, stop=NEVER)
        assert list_stored(store, LAYOUT, 1) == []


def test_a_lost_answer_to_the_commit_harms_nothing(in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    lost = Fault(StoreUnreachable("lost"), landed=True)
    store = MemoryStore(lambda op, key, nth: lost if op == "write" else None)
    with pytest.raises(StoreUnreachable):
        upload(store, LAYOUT, 1, STEP_5, only(folder), facts=FACTS, stop=NEVER)
    (checkpoint,) = list_stored(store, LAYOUT, 1)
    assert isinstance(checkpoint, Checkpoint)
    assert content(restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", stop=NEVER)) == MEMBERS


UPLOADER = """
    import os, signal, sys, threading
    from pathlib import Path
    from runner.checkpoint.layout import StoreLayout, checkpoint_id
    from runner.checkpoint.local import scan
    from runner.checkpoint.upload import Facts, upload
    from runner.storage.folder import FolderStore

    class Dying(FolderStore):
        left = int(sys.argv[3])
        lock = threading.Lock()

        def upload(self, source, key, **options):
            with self.lock:
                self.die()
                return super().upload(source, key, **options)

        def write(self, key, data, **options):
            self.die()
            super().write(key, data, **options)
            self.die()

        def die(self):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1

    (found,) = scan(Path(sys.argv[1]), "any")
    upload(Dying(Path(sys.argv[2])), StoreLayout("digits"), 1, checkpoint_id(9, 2, "fedcba"), found,
           facts=Facts(1.7e9, "", "", ""), workers=int(sys.argv[4]), stop=threading.Event())
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_a_death_anywhere_leaves_the_old_checkpoint_or_the_new_one(
    in_place: Put, folder: Path, tmp_path: Path, workers: int
) -> None:
    in_place("step-5", {"model.bin": b"old"})
    for uploads in range(len(MEMBERS) + 3):
        root = tmp_path / f"store-{uploads}"
        commit(FolderStore(root), only(folder))
        new = tmp_path / f"new-{uploads}"
        shutil.copytree(in_place("step-9", MEMBERS), new / "step-9")
        shutil.rmtree(folder / "step-9")
        command = [sys.executable, "-c", textwrap.dedent(UPLOADER), str(new), str(root), str(uploads), str(workers)]
        code = subprocess.run(command, check=False, timeout=60).returncode
        # The manifest's write dies before and after: with all files there, only the second makes a checkpoint.
        committed = uploads > len(MEMBERS)
        assert code == (0 if uploads == len(MEMBERS) + 2 else -9)
        stored = list_stored(FolderStore(root), LAYOUT, 1)
        assert [one.step for one in stored] == ([9, 5] if committed else [5])
        assert isinstance(stored[0], Checkpoint)
        again = restore(FolderStore(root), LAYOUT, 1, stored[0], tmp_path / f"again-{uploads}", stop=NEVER)
        assert content(again) == (MEMBERS if committed else {"model.bin": b"old"})


# ---- listing


def test_a_listing_is_one_listing_and_says_what_is_bad(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    good, short, missing, garbled, foreign, uncommitted = (
        commit(store, only(folder), step=step).id for step in (1, 2, 3, 4, 5, 6)
    )
    prefix = "digits/run-1/checkpoints/"
    store.write(f"{prefix}{short}/model.bin", b"m" * 4999)
    store.delete([f"{prefix}{missing}/empty"])
    store.write(f"{prefix}{garbled}/cloudrun-manifest.json", b'{"version": 1')
    store.write(f"{prefix}{foreign}/cloudrun-manifest.json", store.read(LAYOUT.manifest(1, good)))
    store.delete([LAYOUT.manifest(1, uncommitted)])
    store.write(f"{prefix}stray", b"")
    store.write(f"{prefix}some-folder/cloudrun-manifest.json", b"{}")
    counting = Counting(store)
    told = list_stored(counting, LAYOUT, 1)
    assert [(one.id, one.step) for one in told] == [(foreign, 5), (garbled, 4), (missing, 3), (short, 2), (good, 1)]
    reasons = [one.reason if isinstance(one, Unreadable) else "" for one in told]
    for reason, words in zip(
        reasons, ["it is of digits", "not JSON", "empty is missing", "4999 bytes", ""], strict=True
    ):
        assert words in reason
        assert bool(words) == bool(reason)
    assert counting.calls == {"list": 1, "read": 5}


def test_equal_steps_come_by_commit_time(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    for attempt, at in [(1, 300.0), (2, 100.0), (3, 200.0)]:
        facts = Facts(at, "", "", "")
        upload(store, LAYOUT, 1, checkpoint_id(5, attempt, "abcdef"), only(folder), facts=facts, stop=NEVER)
    told = list_stored(store, LAYOUT, 1)
    assert [one.attempt for one in told if isinstance(one, Checkpoint)] == [1, 3, 2]


def test_runs_and_jobs_do_not_mix(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    commit(store, only(folder))
    assert list_stored(store, LAYOUT, 11) == []
    assert list_stored(store, StoreLayout("digit"), 1) == []


def test_a_store_that_cannot_be_listed_is_no_empty_store() -> None:
    store = MemoryStore(lambda op, key, nth: Fault(StoreUnreachable("gone"), cut=0) if op == "list" else None)
    with pytest.raises(StoreUnreachable):
        list_stored(store, LAYOUT, 1)


# ---- restore


def test_matching_local_files_are_kept_and_only_the_rest_is_downloaded(
    store: ObjectStore, in_place: Put, folder: Path
) -> None:
    path = in_place("step-5", MEMBERS)
    checkpoint = commit(store, only(folder))
    inode = (path / "model.bin").stat().st_ino
    os.utime(path / "model.bin", ns=(1, 1))
    (path / "deep/er/optim.bin").write_bytes(b"O" * 3000)
    (path / "empty").unlink()
    (path / "stray").write_bytes(b"not of this checkpoint")
    counting = Counting(store)
    restore(counting, LAYOUT, 1, checkpoint, folder, stop=NEVER)
    assert counting.calls["download"] == 2
    assert content(path) == MEMBERS
    assert (path / "model.bin").stat().st_ino == inode
    assert only(folder).signature == checkpoint.signature
    assert os.listdir(folder) == ["step-5"]


@pytest.mark.parametrize("data", [MEMBERS, b"one file"], ids=["folder", "file"])
def test_nothing_moves_when_all_is_there(store: ObjectStore, in_place: Put, folder: Path, data: bytes) -> None:
    path = in_place("step-5", data)
    checkpoint = commit(store, only(folder))
    os.utime(path if path.is_file() else path / "model.bin", ns=(7, 7))
    inode = path.stat().st_ino
    counting = Counting(store)
    restore(counting, LAYOUT, 1, checkpoint, folder, stop=NEVER)
    assert counting.calls["download"] == 0
    assert path.stat().st_ino == inode
    assert only(folder).signature == checkpoint.signature


def test_times_come_back_and_are_set_oldest_first(in_place: Put, folder: Path, tmp_path: Path) -> None:
    members = {f"f{number}": b"x" for number in range(6)}
    path = in_place("step-5", members)
    for name, at in zip(members, [3, 1, 6, 2, 5, 4], strict=True):
        os.utime(path / name, ns=(at * 10**18, at * 10**18))
    store = MemoryStore()
    again = restore(store, LAYOUT, 1, commit(store, only(folder)), tmp_path / "x", stop=NEVER)
    status = {name: (again / name).stat() for name in members}
    assert [status[name].st_mtime_ns // 10**18 for name in members] == [3, 1, 6, 2, 5, 4]
    by_change = sorted(members, key=lambda name: (status[name].st_ctime_ns, status[name].st_mtime_ns))
    assert by_change == ["f1", "f3", "f0", "f5", "f4", "f2"]
    assert again.stat().st_mtime_ns == 6 * 10**18


def test_what_was_restored_counts_as_published(in_place: Put, folder: Path, tmp_path: Path, torch_bytes: bytes) -> None:
    in_place("step-5", {"a.pt": torch_bytes})
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", stop=NEVER)
    (found,) = Shelf(tmp_path / "x").look(1.0)
    assert found.signature == checkpoint.signature


@pytest.mark.parametrize("there", ["file", "folder", "link", "dangling"])
@pytest.mark.parametrize("data", [MEMBERS, b"one file"], ids=["folder", "file"])
def test_whatever_has_the_name_is_replaced(
    in_place: Put, folder: Path, tmp_path: Path, data: bytes, there: str
) -> None:
    path = in_place("step-5", data)
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    outside = tmp_path / "outside"
    os.rename(path, outside)
    if there == "file":
        path.write_bytes(b"else")
    elif there == "folder":
        in_place("step-5", {"model.bin": b"else"})
    else:
        os.symlink(outside if there == "link" else "nowhere", path)
    before = content(outside)
    restore(store, LAYOUT, 1, checkpoint, folder, stop=NEVER)
    assert not path.is_symlink()
    assert content(path) == data
    assert content(outside) == before
    assert os.listdir(folder) == ["step-5"]


Damage = Callable[[MemoryStore, str], None]


def replaced(change: Callable[[bytes], bytes]) -> Damage:
    def go(store: MemoryStore, key: str) -> None:
        store.write(key, change(store.read(key)))

    return go


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (replaced(lambda data: data[:-1]), "model.bin has"),
        (replaced(lambda data: b""), "model.bin has 0 bytes"),
        (replaced(lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:]), "damaged in part 1"),
        (replaced(lambda data: data[:-1] + b"X"), "damaged in part 2"),
        (replaced(lambda data: bytes(len(data))), "damaged in part 1"),
        (lambda store, key: store.delete([key]), "model.bin"),
    ],
    ids=["short", "empty", "flipped", "last", "zeros", "missing"],
)
def test_damage_is_named_and_never_published(
    in_place: Put, folder: Path, tmp_path: Path, damage: Damage, words: str
) -> None:
    in_place("step-5", {"model.bin": BIG, "b.bin": b"b"})
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    damage(store, LAYOUT.checkpoint_prefix(1, checkpoint.id) + "model.bin")
    target = tmp_path / "x"
    (target / "step-5").mkdir(parents=True)
    (target / "step-5" / "model.bin").write_bytes(b"what was here before")
    with pytest.raises((CorruptData, ObjectMissing), match=words):
        restore(store, LAYOUT, 1, checkpoint, target, stop=NEVER)
    assert content(target / "step-5") == {"model.bin": b"what was here before"}
    assert os.listdir(target) == ["step-5"]
    assert [problem for problem in verify(store, LAYOUT, 1, checkpoint) if "model.bin" in problem]


def test_a_bad_manifest_is_told(in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    store.write(LAYOUT.manifest(1, checkpoint.id), b"{}")
    with pytest.raises(CorruptData, match="bad manifest"):
        restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", stop=NEVER)
    assert "bad manifest" in verify(store, LAYOUT, 1, checkpoint)[0]
    store.delete([LAYOUT.manifest(1, checkpoint.id)])
    with pytest.raises(ObjectMissing):
        restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", stop=NEVER)
    assert len(verify(store, LAYOUT, 1, checkpoint)) == 1


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "a/../../escaped", "a\0b"])
def test_hostile_paths_write_nothing(in_place: Put, folder: Path, tmp_path: Path, path: str) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    raw = json.loads(store.read(LAYOUT.manifest(1, checkpoint.id)))
    before = sorted(str(place) for place in tmp_path.rglob("*"))
    for changed in (raw | {"name": path}, raw | {"files": [raw["files"][0] | {"path": path}]}):
        store.write(LAYOUT.manifest(1, checkpoint.id), json.dumps(changed).encode())
        (told,) = list_stored(store, LAYOUT, 1)
        assert isinstance(told, Unreadable)
        with pytest.raises(CorruptData):
            restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", stop=NEVER)
    assert sorted(str(place) for place in tmp_path.rglob("*")) == before


def test_links_on_the_way_are_not_followed(in_place: Put, folder: Path, tmp_path: Path) -> None:
    path = in_place("step-5", {"deep/model.bin": b"new"})
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    outside = tmp_path / "outside"
    os.rename(path / "deep", outside)
    os.symlink(outside, path / "deep")
    before = (outside / "model.bin").stat()
    restore(store, LAYOUT, 1, checkpoint, folder, stop=NEVER)
    assert not (path / "deep").is_symlink()
    assert (outside / "model.bin").stat() == before

    raw = json.loads(store.read(LAYOUT.manifest(1, checkpoint.id)))
    store.write(LAYOUT.manifest(1, checkpoint.id), json.dumps(raw | {"name": "link/step-5"}).encode())
    os.symlink(outside, folder / "link")
    with pytest.raises(CorruptData, match="outside"):
        restore(store, LAYOUT, 1, checkpoint, folder, stop=NEVER)
    assert os.listdir(outside) == ["model.bin"]


def test_stop_ends_a_restore_early_and_publishes_nothing(in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    stop = threading.Event()

    def slow(count: int) -> None:
        stop.set()
        time.sleep(0.3)

    with pytest.raises(TransferStopped):
        restore(store, LAYOUT, 1, checkpoint, tmp_path / "x", workers=1, on_bytes=slow, stop=stop)
    assert os.listdir(tmp_path / "x") == []


def test_pull_is_for_people(in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    mine = pull(store, LAYOUT, 1, checkpoint, tmp_path / "mine", stop=NEVER)
    assert content(mine) == MEMBERS
    (mine / "model.bin").write_bytes(b"damaged")
    assert content(pull(store, LAYOUT, 1, checkpoint, tmp_path / "mine", stop=NEVER)) == MEMBERS


def test_pull_replaces_nothing_that_is_somebodys(in_place: Put, folder: Path, tmp_path: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    checkpoint = commit(store, only(folder))
    theirs = tmp_path / "mine" / "step-5"
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("months of work")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        pull(store, LAYOUT, 1, checkpoint, tmp_path / "mine", stop=NEVER)
    assert content(theirs) == {"notes.txt": b"months of work"}


# ---- removal


def test_removal_takes_the_manifest_first(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    order = list[str]()

    def note(operation: str, key: str, nth: int) -> None:
        if operation == "delete":
            order.append(key.rpartition("/")[2])

    store = MemoryStore(note)
    one, two = commit(store, only(folder), step=1), commit(store, only(folder), step=2)
    remove(store, LAYOUT, 1, [one.id, two.id])
    assert keys(store) == []
    assert order[:2] == ["cloudrun-manifest.json"] * 2


def test_a_removal_that_dies_leaves_no_checkpoint(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    fault = Fault(StoreUnreachable("gone"))
    store = MemoryStore(lambda op, key, nth: fault if op == "delete" and key.endswith("model.bin") else None)
    checkpoint = commit(store, only(folder))
    with pytest.raises(StoreUnreachable):
        remove(store, LAYOUT, 1, [checkpoint.id])
    assert keys(store) != []
    assert list_stored(store, LAYOUT, 1) == []


def test_sweeping_takes_only_old_leftovers(in_place: Put, folder: Path) -> None:
    in_place("step-5", MEMBERS)
    store = MemoryStore()
    good, old = (commit(store, only(folder), step=step) for step in (1, 2))
    store.delete([LAYOUT.manifest(1, old.id)])
    store.write("digits/run-1/checkpoints/foreign", b"")
    now = time.time()
    sweep(store, LAYOUT, 1, now)
    assert {key.split("/")[3] for key in keys(store)} == {good.id, old.id, "foreign"}
    sweep(store, LAYOUT, 1, now + 90_000)
    assert {key.split("/")[3] for key in keys(store)} == {good.id, "foreign"}
