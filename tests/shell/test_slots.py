"""What the supervisor reads of shared memory, and how much of it there may be."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.supervisor.slots import (
    LARGEST_META,
    LEFTOVER_S,
    SharedFolder,
    clear_slot,
    free_memory,
    newest_whole,
    read_slot,
    remove_leftovers,
    room_in,
)
from tests.shell.slot_files import WRITING, write_slot


def test_a_ready_slot_tells_where_its_parts_are(tmp_path: Path) -> None:
    path = write_slot(tmp_path, 12, sequence=7, meta=b'{"a": 1}' * 600)
    slot = read_slot(path)
    assert slot is not None
    assert (slot.rank, slot.world, slot.sequence, slot.step) == (0, 1, 7, 12)
    assert slot.image_at == 4096 + 8192
    assert slot.read_meta() == b'{"a": 1}' * 600
    content = path.read_bytes()[slot.image_at :][: slot.image]
    assert int.from_bytes(content[:8], "little") + 8 + 10_000 == slot.image


def test_one_that_was_cleared_is_not_ready(tmp_path: Path) -> None:
    slot = read_slot(write_slot(tmp_path, 12))
    assert slot is not None
    clear_slot(slot)
    assert read_slot(slot.path) is None
    slot.path.unlink()
    clear_slot(slot)


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, b"X"),  # magic
        (16, b"\0"),  # empty
        (16, b"\1"),  # being written
        (32, b"\xff" * 8),  # a step beyond all counting
        (40, b"\1"),  # another rank than the name's
        (44, b"\0"),  # of no ranks
        (48, b"\xff" * 8),  # meta beyond the end
        (56, struct.pack("<Q", 1 << 40)),  # image beyond the end
    ],
)
def test_a_header_that_is_not_possible_is_not_believed(tmp_path: Path, at: int, data: bytes) -> None:
    path = write_slot(tmp_path, 12)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    assert read_slot(path) is None


def test_links_pipes_and_stumps_are_not_followed(tmp_path: Path) -> None:
    real = write_slot(tmp_path, 12)
    (tmp_path / "rank0-1").symlink_to(real)
    os.mkfifo(tmp_path / "rank0-2")
    (tmp_path / "rank0-3").write_bytes(b"CLOUDRUN")
    (tmp_path / "rank0-4").mkdir()
    assert [read_slot(tmp_path / f"rank0-{number}") for number in range(1, 6)] == [None] * 5


def test_the_newest_step_that_all_ranks_have_counts(tmp_path: Path) -> None:
    for rank, steps in enumerate([(8, 12), (12, 8), (8, 16)]):
        for number, step in enumerate(steps):
            write_slot(tmp_path, step, rank=rank, number=number, world=3)
    slots = [slot for path in sorted(tmp_path.iterdir()) if (slot := read_slot(path)) is not None]
    assert [(slot.rank, slot.step) for slot in newest_whole(slots)] == [(0, 8), (1, 8), (2, 8)]
    assert newest_whole([slot for slot in slots if slot.rank != 1]) == []


def test_a_folder_is_private_and_has_one_owner(tmp_path: Path) -> None:
    one, other = SharedFolder(tmp_path, "job"), SharedFolder(tmp_path, "job")
    one.open()
    assert one.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(TimeoutError):
        other.open(within=0.0)
    write_slot(one.path, 12)
    assert [slot.step for slot in one.slots()] == [12]
    one.close(remove=False)
    other.open(within=0.0)
    assert [slot.step for slot in other.slots()] == [12]
    other.close(remove=True)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path, "job")
    folder.path.mkdir(mode=0o777)
    folder.path.chmod(0o777)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        folder.open()
    folder.path.rmdir()
    folder.path.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        folder.open()


def test_what_dead_jobs_left_goes_but_what_somebody_may_still_save_waits_an_hour(tmp_path: Path) -> None:
    folders = {name: SharedFolder(tmp_path, name) for name in ("living", "dead", "unsaved", "ours")}
    for name, folder in folders.items():
        folder.open()
        write_slot(folder.path, 12, state=WRITING if name == "dead" else 2)
        (folder.path / "claims").touch()
        if name != "living":
            folder.close(remove=False)
    now = time.time()
    remove_leftovers(tmp_path, folders["ours"].path, now)
    assert {name for name, folder in folders.items() if folder.path.exists()} == {"living", "unsaved", "ours"}
    remove_leftovers(tmp_path, folders["ours"].path, now + LEFTOVER_S + 5)
    assert {name for name, folder in folders.items() if folder.path.exists()} == {"living", "ours"}
    folders["living"].close(remove=True)


MIB = 1 << 20


def a_system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    1048576 kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_is_what_the_tightest_control_group_leaves(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {100 * MIB}\nactive_file {50 * MIB}\n"
    version_two = a_system(
        tmp_path / "two",
        "0::/a/b\n",
        {
            "sys/fs/cgroup/a/memory.max": f"{900 * MIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{800 * MIB}\n",
            "sys/fs/cgroup/a/memory.stat": stat,
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": f"{800 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.stat": stat,
        },
    )
    assert free_memory(version_two) == 250 * MIB
    version_one = a_system(
        tmp_path / "one",
        "4:memory:/x\n0::/\n",
        {
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{500 * MIB}\n",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{400 * MIB}\n",
            "sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {MIB}\ntotal_active_file 0\n",
        },
    )
    assert free_memory(version_one) == 101 * MIB
    assert free_memory(a_system(tmp_path / "none", "0::/\n", {})) == 1024 * MIB


def test_room_is_the_lesser_of_what_is_free_there_and_a_share_of_memory(tmp_path: Path) -> None:
    system = a_system(tmp_path, "0::/\n", {})
    assert room_in(tmp_path, system) == int(1024 * MIB * 0.4)
    disk = os.statvfs(tmp_path)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {1 << 50} kB\n")
    assert abs(room_in(tmp_path, system) - disk.f_bavail * disk.f_frsize) < 1 << 30


def test_a_shared_memory_without_a_limit_has_the_room_that_memory_has(
    tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    assert room_in(mount("size=0"), a_system(tmp_path, "0::/\n", {})) == int(1024 * MIB * 0.4)


def test_a_rank_in_the_place_of_another_is_not_believed(tmp_path: Path) -> None:
    path = write_slot(tmp_path, 12, rank=1, world=2)
    assert read_slot(path.rename(tmp_path / "rank0-0")) is None


def test_a_description_larger_than_any_is_not_read(tmp_path: Path) -> None:
    path = write_slot(tmp_path, 12)
    with path.open("r+b") as file:
        file.seek(48)
        file.write(struct.pack("<QQ", LARGEST_META + 1, 0))
        file.truncate(LARGEST_META + (1 << 20))  # sparse
    assert read_slot(path) is None
