"""What only a folder can get wrong: links, special files, crashes, full and read-only disks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.errors import (
    AccessDenied,
    BadKey,
    DiskFull,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreUnreachable,
)
from runner.files import part_path
from runner.storage.folder import FolderStore, publish_new, rename_new


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def store(root: Path) -> FolderStore:
    return FolderStore(root)


def keys(store: FolderStore, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix))


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Links


def test_links_are_followed_for_reading(store: FolderStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep/file").write_bytes(b"outside")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "deep/file")
    assert keys(store) == ["file", "folder/deep/file"]
    assert keys(store, "folder/d") == ["folder/deep/file"]
    assert store.read("folder/deep/file") == store.read("file") == b"outside"


def test_a_loop_of_links_ends(store: FolderStore, root: Path) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "a/file").write_bytes(b"x")
    (root / "a/b/up").symlink_to(root / "a")
    (root / "a/b/top").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "dangling").symlink_to(root / "nothing")
    assert keys(store) == ["a/file"]
    for key in ["self", "dangling"]:
        with pytest.raises(ObjectMissing):
            store.read(key)


def test_nothing_is_written_or_deleted_through_a_link_that_leads_out(
    store: FolderStore, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    (root / "out").symlink_to(outside)
    attempts: list[Callable[[], object]] = [
        lambda: store.write("out/file", b"x"),
        lambda: store.write("out/new", b"x", only_new=True),
        lambda: store.write("out/deep/new", b"x"),
        lambda: store.upload(outside / "file", "out/copy"),
        lambda: store.delete(["out/file"]),
    ]
    for attempt in attempts:
        with pytest.raises(BadKey, match="leads out"):
            attempt()
    assert everything(outside) == ["file"]
    assert (outside / "file").read_bytes() == b"precious"


def test_a_linked_file_is_replaced_or_removed_itself(store: FolderStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (root / "link").symlink_to(outside)
    with pytest.raises(ObjectExists):
        store.write("link", b"new", only_new=True)
    store.write("link", b"new")
    assert store.read("link") == b"new"
    (root / "link2").symlink_to(outside)
    store.delete(["link2"])
    assert keys(store) == ["link"]
    assert outside.read_bytes() == b"precious"


def test_a_link_to_a_folder_is_not_replaced_by_an_object(store: FolderStore, root: Path) -> None:
    (root / "real").mkdir()
    (root / "real/file").write_bytes(b"x")
    (root / "link").symlink_to("real")
    store.write("link/other", b"y")
    with pytest.raises(BadKey):
        store.write("link", b"x")
    assert keys(store) == ["link/file", "link/other", "real/file", "real/other"]


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    store = FolderStore(tmp_path / "alias")
    store.write("a/b", b"x")
    store.delete(["a/b"])
    assert everything(root) == []


# Names and kinds of files


def test_special_files_are_no_objects(store: FolderStore, root: Path, tmp_path: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(root / "socket"))
        store.write("file", b"x")
        assert keys(store) == ["file"]
        for key in ["pipe", "socket"]:
            with pytest.raises(ObjectMissing):
                store.read(key)
    with pytest.raises(StoreError, match="regular"):
        store.upload(root / "pipe", "copy")


def test_a_name_that_is_no_text_is_named(store: FolderStore, root: Path) -> None:
    (root / "fine").write_bytes(b"x")
    os.close(os.open(os.fsencode(root) + b"/caf\xe9", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(StoreError, match=re.escape(r"caf\xe9")):
        keys(store)
    assert keys(store, "fine") == ["fine"]


def test_unfinished_writes_and_nfs_leftovers_are_hidden(store: FolderStore, root: Path) -> None:
    part, leftover = part_path(root / "file"), root / ".nfs000000000c2f3b1e00000004"
    for path in [part, leftover, root / ".nfs", root / ".nfsfile", root / ".hidden"]:
        path.write_bytes(b"x")
    assert keys(store) == [".hidden", ".nfs", ".nfsfile"]
    for name in [part.name, leftover.name]:
        with pytest.raises(BadKey):
            store.write(name, b"x")
        with pytest.raises(ObjectMissing):
            store.read(name)


def test_a_long_name_of_wide_characters(store: FolderStore) -> None:
    key = "🚀" * 63
    store.write(key, b"x")
    assert keys(store) == [key]


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreError, match="not a folder"):
        keys(FolderStore(tmp_path / "file"))


def test_a_root_that_goes_away_is_neither_empty_nor_made_anew(store: FolderStore, root: Path, tmp_path: Path) -> None:
    store.write("a/file", b"x")
    store.write("b/file", b"x")
    listing = store.list()
    next(listing)
    root.rename(tmp_path / "unmounted")
    file = tmp_path / "file"
    file.write_bytes(b"x")
    calls: list[Callable[[], object]] = [
        lambda: list(listing),
        lambda: keys(store),
        lambda: store.read("a/file"),
        lambda: store.download("a/file", tmp_path / "copy"),
        lambda: store.write("a/file", b"y"),
        lambda: store.upload(file, "c/file"),
        lambda: store.delete(["a/file"]),
    ]
    for call in calls:
        with pytest.raises(StoreUnreachable, match="is not there"):
            call()
    assert not root.exists()
    (tmp_path / "unmounted").rename(root)
    assert keys(store) == ["a/file", "b/file"]


@pytest.mark.root
def test_a_mount_point_is_no_store_while_nothing_is_mounted(mount: Callable[[str], Path]) -> None:
    disk = mount("size=1m")
    store = FolderStore(disk)
    store.write("a", b"x")
    subprocess.run(["umount", "-l", str(disk)], check=True)
    try:
        for call in (lambda: keys(store), lambda: store.write("b", b"x"), lambda: store.read("a")):
            with pytest.raises(StoreUnreachable, match="is not there"):
                call()
        assert everything(disk) == []
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True)
    assert keys(store) == []


@pytest.mark.parametrize("below", ["", "jobs/digits"])
def test_a_link_to_a_disk_that_is_not_mounted_is_no_empty_store(root: Path, tmp_path: Path, below: str) -> None:
    root.rmdir()
    root.symlink_to(tmp_path / "not mounted")
    with pytest.raises(StoreUnreachable, match="is not there"):
        keys(FolderStore(root / below))


def test_an_empty_folder_gives_way_and_a_full_one_does_not(store: FolderStore, root: Path) -> None:
    (root / "empty").mkdir()
    store.write("empty", b"x", only_new=True)
    store.write("full/file", b"x")
    for only_new in (False, True):
        with pytest.raises(BadKey):
            store.write("full", b"x", only_new=only_new)
    assert keys(store) == ["empty", "full/file"]


def test_a_delete_leaves_no_empty_folders_of_its_own(store: FolderStore, root: Path) -> None:
    (root / "theirs").mkdir()
    store.write("a/b/c/1", b"x")
    store.write("a/2", b"x")
    store.delete(["a/b/c/1", "theirs/nothing"])
    assert everything(root) == ["a", "a/2", "theirs"]


def test_a_file_changed_in_place_is_noticed(store: FolderStore, root: Path, tmp_path: Path) -> None:
    info = store.write("k", b"x" * 1000)

    def scribble(_count: int) -> None:
        with (root / "k").open("r+b") as file:
            file.write(b"y")

    for version in (info.version, None):
        with pytest.raises(ObjectChanged):
            store.download("k", tmp_path / "copy", version=version, on_bytes=scribble)
        info = next(store.list("k"))


# Part files of dead writers


def test_old_part_files_go_and_young_ones_stay(root: Path) -> None:
    class Clock:
        time = 1_700_000_000.0

        def now(self) -> float:
            return self.time

    (root / "a").mkdir()
    old, young = part_path(root / "a/x"), part_path(root / "a/x")
    for path, age in [(old, 90_000), (young, 80_000)]:
        path.write_bytes(b"half")
        os.utime(path, (Clock.time - age, Clock.time - age))
    FolderStore(root, clock=Clock()).write("a/k", b"x")
    assert everything(root) == sorted(["a", "a/k", f"a/{young.name}"])

    later = Clock()
    later.time += 86_400
    FolderStore(root, clock=later).delete(["a/k"])
    assert everything(root) == []


UPLOADER = """
import os, signal, sys
from pathlib import Path
from runner.storage.folder import FolderStore

def die(count):
    os.kill(os.getpid(), signal.SIGKILL)

FolderStore(Path(sys.argv[1])).upload(Path(sys.argv[2]), "a/k", on_bytes=die)
"""


def test_a_writer_killed_in_mid_upload_leaves_no_object(store: FolderStore, root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"new" * (8 << 20))
    died = subprocess.run([sys.executable, "-c", UPLOADER, str(root), str(source)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert keys(store) == []
    assert len(everything(root)) == 2
    store.write("a/k", b"old")
    subprocess.run([sys.executable, "-c", UPLOADER, str(root), str(source)], check=False)
    assert keys(store) == ["a/k"]
    assert store.read("a/k") == b"old"


# Order on the disk

WRITER = """
import sys
from pathlib import Path
from runner.storage.folder import FolderStore
store = FolderStore(Path(sys.argv[1]))
if sys.argv[2] == "upload":
    store.upload(Path(sys.argv[3]), "new/folder/k")
else:
    store.write("new/folder/k", b"x", only_new=sys.argv[2] == "only_new")
"""

CALL = re.compile(
    r"(fsync|fdatasync|rename|renameat|renameat2|link|linkat|mkdir)\((?:\d+<([^>]*)>|AT_FDCWD<[^>]*>, )?(.*)"
)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not here")
@pytest.mark.parametrize(("way", "publish"), [("upload", "rename"), ("write", "rename"), ("only_new", "link")])
def test_data_then_name_then_folders_reach_the_disk(root: Path, tmp_path: Path, way: str, publish: str) -> None:
    source, trace = tmp_path / "source", tmp_path / "trace"
    source.write_bytes(b"x")
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2,link,linkat,mkdir"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", calls, sys.executable, "-B", "-c", WRITER]
    done = subprocess.run([*command, str(root), way, str(source)], check=False, capture_output=True, text=True)
    if "ptrace" in done.stderr:
        pytest.skip("tracing is not allowed here")
    assert done.returncode == 0, done.stderr
    folder = root / "new/folder"
    steps = [_step(line, root) for line in trace.read_text().splitlines() if str(root) in line]
    assert steps == [
        "mkdir new",
        "fsync .",
        "mkdir new/folder",
        "fsync new",
        "fsync part",
        publish,
        "fsync new/folder",
    ], folder


def _step(line: str, root: Path) -> str:
    match = CALL.search(line)
    assert match, line
    call, synced, rest = match.groups()
    if call.startswith("fsync") or call == "fdatasync":
        return "fsync part" if "cloudrun-part" in synced else f"fsync {os.path.relpath(synced, root)}"
    if call == "mkdir":
        return f"mkdir {os.path.relpath(rest.split(chr(34))[1], root)}"
    return "rename" if call.startswith("rename") else "link"


# Where there are no hard links


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_a_rename_that_does_not_replace_does(root: Path, code: int) -> None:
    def no_links(part: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    part, target = root / "part", root / "target"
    part.write_bytes(b"first")
    publish_new(part, target, no_links)
    assert everything(root) == ["target"]
    part.write_bytes(b"second")
    with pytest.raises(ObjectExists):
        publish_new(part, target, no_links)
    assert target.read_bytes() == b"first"


def test_a_link_whose_answer_was_lost_is_ours(root: Path) -> None:
    def link_twice(part: Path, target: Path) -> None:
        os.link(part, target)
        os.link(part, target)

    part, target = root / "part", root / "target"
    part.write_bytes(b"first")
    publish_new(part, target, link_twice)
    assert target.read_bytes() == b"first"


def test_renames_that_fail_say_why(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        rename_new(root / "nothing", root / "target")


# Folders that come and go


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(store: FolderStore) -> None:
    def churn(name: int) -> None:
        for _ in range(200):
            store.write(f"a/b/{name}", b"x")
            store.delete([f"a/b/{name}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert keys(store) == []


# Trouble with the disk


@pytest.mark.root
def test_a_full_disk_says_how_much_is_missing(mount: Callable[[str], Path], tmp_path: Path) -> None:
    disk = mount("size=2m")
    store = FolderStore(disk)
    store.write("before", b"kept")
    source = tmp_path / "source"
    source.write_bytes(b"x" * (5 << 20))
    with pytest.raises(DiskFull, match=r"needs 5 MiB, .* missing"):
        store.upload(source, "big")
    with pytest.raises(DiskFull):
        store.write("big", b"x" * (5 << 20))
    assert everything(disk) == ["before"]
    target = disk / "copy"
    with pytest.raises(DiskFull, match="missing"):
        store_with(tmp_path, source).download("big", target)


def store_with(folder: Path, source: Path) -> FolderStore:
    store = FolderStore(folder / "other")
    store.upload(source, "big")
    return store


@pytest.mark.root
def test_a_read_only_disk_denies(mount: Callable[[str], Path]) -> None:
    disk = mount("size=2m")
    store = FolderStore(disk)
    store.write("k", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    attempts: list[Callable[[], object]] = [
        lambda: store.write("k", b"y"),
        lambda: store.write("new/k", b"y"),
        lambda: store.delete(["k"]),
    ]
    for attempt in attempts:
        with pytest.raises(AccessDenied):
            attempt()
    assert store.read("k") == b"x"


AS_NOBODY = """
import os, sys
from pathlib import Path
from runner.errors import AccessDenied
from runner.storage.folder import FolderStore
os.setgid(65534), os.setuid(65534)
store = FolderStore(Path(sys.argv[1]))
assert store.read("open/k") == b"x"
assert [info.key for info in store.list("open/")] == ["open/k"]
for attempt in [lambda: list(store.list()), lambda: store.read("closed/k"), lambda: store.write("closed/new", b"")]:
    try:
        attempt()
    except AccessDenied:
        continue
    sys.exit("not denied")
"""


@pytest.mark.root
def test_a_closed_folder_denies_and_never_ends_a_listing_early(mount: Callable[[str], Path]) -> None:
    disk = mount("size=2m,mode=755")
    store = FolderStore(disk)
    store.write("closed/k", b"x")
    store.write("open/k", b"x")
    (disk / "closed").chmod(0o700)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, str(disk)], check=False, capture_output=True, text=True)
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("nobody cannot even import the package here")
    assert done.returncode == 0, done.stderr
