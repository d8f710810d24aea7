"""Private copies: taken when they are worth it, exactly what was found, and never more than two."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.checkpoint import copies
from runner.checkpoint.copies import PrivateCopies
from runner.checkpoint.local import Found, Shelf, scan
from runner.storage.local import free_bytes
from tests.checkpoint import trees

Put = Callable[[str, bytes | dict[str, bytes]], Path]


@pytest.fixture
def room(tmp_path: Path) -> Path:
    return tmp_path / "copies"


def found(folder: Path, name: str = "last.pt") -> Found:
    (one,) = [one for one in scan(folder) if one.name == name]
    assert one.verdict.complete
    return one


def held(room: Path) -> list[str]:
    return sorted(str(path.relative_to(room).name) for path in room.rglob("*") if path.is_file())


def test_a_name_that_tells_no_step_is_copied(in_place: Put, folder: Path, room: Path) -> None:
    data = trees.torch_file(global_step=5)
    in_place("last.pt", data)
    os.utime(folder / "last.pt", ns=(10**18, 10**18 + 7))
    one, private = found(folder), PrivateCopies(room, "auto")
    private.take(one)
    copy = private.lend(one.signature)
    assert copy is not None
    assert copy == replace(one, path=copy.path)
    assert copy.path.read_bytes() == data
    assert copy.path.stat().st_mtime_ns == 10**18 + 7
    assert copy.path.stat().st_nlink == 1
    assert copy.path.stat().st_ino != (folder / "last.pt").stat().st_ino
    assert scan(copy.path.parent)[0].signature == one.signature


def test_a_folder_of_one_name_is_copied_with_all_that_is_in_it(in_place: Put, folder: Path, room: Path) -> None:
    in_place("last", {"model.pt": trees.torch_file(), "deep/er/optim.pt": trees.torch_file(), "note.txt": b""})
    one, private = found(folder, "last"), PrivateCopies(room, "auto")
    private.take(one)
    copy = private.lend(one.signature)
    assert copy is not None
    assert scan(copy.path.parent)[0].files == one.files


def test_a_numbered_one_is_copied_only_once_it_was_written_anew(in_place: Put, folder: Path, room: Path) -> None:
    in_place("step-5.pt", trees.torch_file(a=1))
    private, first = PrivateCopies(room, "auto"), found(folder, "step-5.pt")
    private.take(first)
    assert private.lend(first.signature) is None
    os.utime(in_place("step-5.pt", trees.torch_file(a=2)), ns=(1, 1))
    second = found(folder, "step-5.pt")
    private.take(second)
    copy = private.lend(second.signature)
    assert copy is not None
    assert copy.path.read_bytes() == trees.torch_file(a=2)


@pytest.mark.parametrize(("pause", "copied"), [(copies.QUICKLY_S - 1, True), (copies.QUICKLY_S + 1, False)])
def test_a_large_one_is_copied_when_it_is_renewed_quickly(
    in_place: Put, folder: Path, room: Path, monkeypatch: pytest.MonkeyPatch, pause: float, copied: bool
) -> None:
    monkeypatch.setattr(copies, "SMALL", 10)
    private = PrivateCopies(room, "auto")
    for seconds in (1000.0, 1000.0 + pause):
        os.utime(in_place("last.pt", trees.torch_file()), (seconds, seconds))
        one = found(folder)
        private.take(one)
        assert (private.lend(one.signature) is not None) is (copied and seconds > 1000)


def test_where_there_is_no_room_the_trainers_own_files_must_do(
    in_place: Put, folder: Path, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place("last.pt", trees.torch_file())
    one = found(folder)
    for free, copied in ((3 * one.bytes - 1, False), (3 * one.bytes, True)):
        monkeypatch.setattr(copies, "free_bytes", lambda _folder, free=free: free)
        private = PrivateCopies(room, "auto")
        private.take(one)
        assert (private.lend(one.signature) is not None) is copied
        assert held(room) == (["last.pt"] if copied else [])


def test_what_changed_since_it_was_found_is_not_copied(in_place: Put, folder: Path, room: Path) -> None:
    in_place("last.pt", trees.torch_file(a=1))
    one, private = found(folder), PrivateCopies(room, "auto")
    changes: list[Callable[[], object]] = [
        lambda: in_place("last.pt", trees.torch_file(a=1)[:-5]),
        lambda: os.utime(in_place("last.pt", trees.torch_file(a=2)), ns=(3, 3)),
        (folder / "last.pt").unlink,
    ]
    for change in changes:
        change()
        private.take(one)
        assert private.lend(one.signature) is None
        assert held(room) == []


def test_a_copy_that_is_torn_is_thrown_away(in_place: Put, folder: Path, room: Path) -> None:
    """A writer that hides its traces: same size, same times, half the bytes of the next save."""
    in_place("last.pt", trees.torch_file())
    one, private = found(folder), PrivateCopies(room, "auto")
    mtime = (folder / "last.pt").stat().st_mtime_ns
    os.utime(in_place("last.pt", bytes(100) + trees.torch_file()[100:]), ns=(mtime, mtime))
    private.take(one)
    assert private.lend(one.signature) is None


def test_only_the_newest_and_the_one_that_is_uploaded_stay(in_place: Put, folder: Path, room: Path) -> None:
    private, taken = PrivateCopies(room, "auto"), list[Found]()
    for number in range(4):
        os.utime(in_place("last.pt", trees.torch_file(a=number)), ns=(number, number))
        taken.append(found(folder))
        private.take(taken[-1])
        if number == 1:
            lent = private.lend(taken[1].signature)
        assert len(held(room)) == (1 if number < 2 else 2)
    assert lent is not None
    assert lent.path.read_bytes() == trees.torch_file(a=1), "it stays while it is lent"
    assert private.lend(taken[2].signature) is None
    assert private.lend(taken[3].signature) is not None
    assert len(held(room)) == 1
    private.give_back(taken[3].signature)
    assert held(room) == []
    assert private.lend(taken[3].signature) is None
    private.give_back(taken[3].signature)


def test_what_an_earlier_life_left_goes(in_place: Put, folder: Path, room: Path) -> None:
    in_place("last.pt", trees.torch_file())
    PrivateCopies(room, "auto").take(found(folder))
    assert held(room) == ["last.pt"]
    PrivateCopies(room, "auto")
    assert held(room) == []


@pytest.fixture(params=["xfs", "btrfs"])
def sharing_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On a file system in which files can share their blocks, with 100 MiB free and more."""
    make, disk, point = f"mkfs.{request.param}", tmp_path / "disk", tmp_path / "sharing"
    if os.geteuid() or shutil.which(make) is None:
        pytest.skip(f"needs root and {make}")
    with open(disk, "wb") as file:
        file.truncate(400 << 20)
    subprocess.run([make, "-q", str(disk)], check=True)
    point.mkdir()
    if subprocess.run(["mount", "-o", "loop", str(disk), str(point)], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    yield point
    subprocess.run(["umount", str(point)], check=True)


@pytest.mark.root
def test_where_blocks_are_shared_a_copy_of_anything_costs_nothing(sharing_folder: Path) -> None:
    shelf, private = Shelf(sharing_folder), PrivateCopies(sharing_folder / ".copies", "any")
    (sharing_folder / "step-5.bin").write_bytes(os.urandom(150 << 20))
    os.sync()
    free = free_bytes(sharing_folder)
    for one in scan(sharing_folder, "any"):
        private.take(one)
        copy = private.lend(one.signature)
        assert copy is not None, "numbered, and no room for two more: it costs nothing"
        os.sync()
        assert free - free_bytes(sharing_folder) < 1 << 20
        whole = copy.path.read_bytes()
        with open(one.path, "r+b") as file:
            file.write(b"written anew in place")
        assert copy.path.read_bytes() == whole
    assert shelf.look(0.0) == []


def test_every_copy_of_a_name_that_is_written_all_the_time_is_whole(folder: Path, room: Path) -> None:
    """The trainer truncates and writes its only file again and again; what is copied always loads."""
    import torch

    ended = threading.Event()

    def train() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            torch.save({"global_step": step, "w": torch.full((20_000,), float(step))}, folder / "last.pt")
            ended.wait(0.15)

    trainer = threading.Thread(target=train)
    trainer.start()
    shelf, private, copied = Shelf(folder, settle_s=0.0), PrivateCopies(room, "auto"), 0
    give_up = time.monotonic() + 20
    while copied < 15 and time.monotonic() < give_up:
        for one in shelf.look(time.time()):
            private.take(one)
            copy = private.lend(one.signature)
            if copy is not None:
                state = torch.load(copy.path)
                assert bool((state["w"] == state["global_step"]).all())
                copied += 1
    ended.set()
    trainer.join()
    assert copied == 15
