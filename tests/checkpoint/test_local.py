"""The checkpoint folder: proof that a writer has finished, each checkpoint told once, nothing of ours in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.local import Found, Shelf, clear_unfinished, open_for_writing, scan, set_aside
from runner.files import part_path
from tests.checkpoint import trees

Put = Callable[[str, bytes | dict[str, bytes]], Path]


def names(founds: list[Found]) -> list[str]:
    return [found.name for found in founds]


# ---- one scan


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert scan(tmp_path / "gone") == []
    assert Shelf(tmp_path / "gone").look(1.0) == []


def test_what_a_scan_tells(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    path = in_place("step-5", {"a.pt": torch_bytes, "deep/note.txt": b"hello"})
    os.utime(path / "a.pt", ns=(10**18, 10**18))
    os.utime(path / "deep/note.txt", ns=(2 * 10**18, 2 * 10**18))
    (found,) = scan(folder)
    assert (found.name, found.path, found.is_dir, found.step) == ("step-5", path, True, 5)
    assert found.files == (("a.pt", len(torch_bytes), 10**18), ("deep/note.txt", 5, 2 * 10**18))
    assert (found.bytes, found.newest_mtime) == (len(torch_bytes) + 5, 2e9)
    value = found.as_checkpoint(5, attempt=3)
    assert (value.id, value.step, value.attempt, value.files, value.time) == ("local:step-5", 5, 3, 2, 2e9)
    assert value.signature == found.signature


def test_hidden_temporary_linked_and_special_entries_are_ignored(
    in_place: Put, torch_bytes: bytes, folder: Path, tmp_path: Path
) -> None:
    in_place("step-1.pt", torch_bytes)
    for name in (".step-2.pt", "tmp-step-3.pt", "step-4.pt.tmp", "step-5.pt.part"):
        in_place(name, torch_bytes)
    (tmp_path / "outside.pt").write_bytes(torch_bytes)
    os.symlink("step-1.pt", folder / "latest.pt")
    os.symlink(tmp_path / "outside.pt", folder / "step-6.pt")
    os.symlink(tmp_path, folder / "step-7")
    os.symlink("nowhere", folder / "step-8.pt")
    os.mkfifo(folder / "step-9.pt")
    assert names(scan(folder)) == ["step-1.pt"]


def test_our_own_manifest_is_no_file_of_a_checkpoint(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    in_place("step-1", {"a.pt": torch_bytes, "cloudrun-manifest.json": b"{}"})
    assert [file.path for file in scan(folder)[0].files] == ["a.pt"]


def test_a_file_that_nfs_keeps_for_its_readers_is_no_file_of_a_checkpoint(
    in_place: Put, torch_bytes: bytes, folder: Path
) -> None:
    in_place("step-1", {"a.pt": torch_bytes, ".nfs00000000a1b2c3d400000001": b"deleted"})
    assert [file.path for file in scan(folder)[0].files] == ["a.pt"]


def test_names_that_no_store_can_hold(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    in_place("step-1", {"a\n.pt": torch_bytes})
    (folder / os.fsdecode(b"step-2-\xff.pt")).write_bytes(torch_bytes)
    assert [(found.verdict.complete, "cannot be stored" in found.verdict.reason) for found in scan(folder)] == [
        (False, True),
        (False, True),
    ]


def test_a_link_inside_a_folder_is_its_target_and_a_dangling_one_is_a_fault(
    in_place: Put, torch_bytes: bytes, folder: Path
) -> None:
    path = in_place("step-1", {"a.pt": torch_bytes})
    os.symlink("a.pt", path / "b.pt")
    assert [file.size for file in scan(folder)[0].files] == [len(torch_bytes)] * 2
    os.symlink("nowhere", path / "c.pt")
    assert scan(folder) == []


def test_published_means_renamed_after_the_last_write(
    in_place: Put, publish: Put, torch_bytes: bytes, folder: Path
) -> None:
    publish("step-1.pt", torch_bytes)
    in_place("step-2.pt", torch_bytes)
    publish("step-3", {"a.pt": torch_bytes, "deep/b.pt": torch_bytes})
    in_place("step-4", {"a.pt": torch_bytes, "deep/b.pt": torch_bytes})
    assert [found.published for found in scan(folder)] == [True, False, True, False]


def test_a_write_after_the_rename_takes_the_proof_away(publish: Put, torch_bytes: bytes, folder: Path) -> None:
    for late in (b"changed", None):
        path = publish("step-3", {"a.pt": torch_bytes, "deep/b.txt": b"1"})
        if late:
            (path / "deep/b.txt").write_bytes(late)
        else:
            (path / "deep/new.txt").write_bytes(b"new")
        assert not scan(folder)[0].published
        shutil.rmtree(path)


# ---- the shelf


def test_published_ones_are_told_at_once_and_once(publish: Put, torch_bytes: bytes, folder: Path) -> None:
    shelf = Shelf(folder)
    publish("step-2.pt", torch_bytes)
    publish("step-1", {"a.pt": torch_bytes, "unknown": b"x"})
    assert names(shelf.look(100.0)) == ["step-1", "step-2.pt"]
    assert shelf.look(200.0) == []
    assert shelf.last_look(300.0, clean_exit=True) == []


def test_others_must_be_quiet(in_place: Put, torch_bytes: bytes, legacy_bytes: bytes, folder: Path) -> None:
    shelf = Shelf(folder)
    in_place("step-1.pt", torch_bytes)
    in_place("step-2.pt", legacy_bytes)
    in_place("step-3", {"a.pt": torch_bytes})
    assert names(shelf.look(100.0)) == ["step-1.pt"], "whole, and nobody writes it"
    assert shelf.look(104.9) == []
    assert names(shelf.look(105.0)) == ["step-2.pt", "step-3"]


def test_a_later_save_proves_that_the_earlier_one_is_finished(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    """Folders one second apart, then the trainer is killed in the middle of the third."""
    for step in (5, 10, 15):
        parts = {"model.pt": torch_bytes, "config.json": b"{}"}
        in_place(f"checkpoint-{step}", parts if step < 15 else {"model.pt": torch_bytes[:-1]})
        for file in (folder / f"checkpoint-{step}").iterdir():
            os.utime(file, (1000.0 + step, 1000.0 + step))
    shelf = Shelf(folder)
    assert names(shelf.last_look(2000.0, clean_exit=False)) == ["checkpoint-5", "checkpoint-10"]
    assert [name for name, _ in shelf.refused] == ["checkpoint-15"]


def test_a_change_counts_as_new(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    shelf = Shelf(folder)
    path = in_place("last.pt", torch_bytes)
    assert names(shelf.look(100.0)) == ["last.pt"]
    os.utime(path, ns=(5, 5))
    os.utime(in_place("last.pt", torch_bytes))
    assert names(shelf.look(102.0)) == ["last.pt"]
    in_place("last.pt", torch_bytes + torch_bytes)
    assert shelf.look(110.0) == []
    os.utime(in_place("last.pt", torch_bytes), ns=(9, 9))
    assert names(shelf.look(112.0)) == ["last.pt"]


def test_incomplete_ones_are_never_told(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    shelf = Shelf(folder)
    in_place("step-1.pt", torch_bytes[:-1])
    in_place("config.json", b"{}")
    assert [shelf.look(now) for now in (0.0, 100.0)] == [[], []]
    assert shelf.last_look(200.0, clean_exit=True) == []
    assert [name for name, _ in shelf.refused] == ["step-1.pt"]


OPEN_AND_WAIT = "import sys; file = open(sys.argv[1], sys.argv[2]); print('open', flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("mode", "taken"), [("ab", False), ("r+b", False), ("rb", True)])
def test_nothing_that_is_open_for_writing_is_told(
    in_place: Put, torch_bytes: bytes, folder: Path, mode: str, taken: bool
) -> None:
    path = in_place("step-1", {"a.pt": torch_bytes}) / "a.pt"
    command = [sys.executable, "-c", OPEN_AND_WAIT, str(path), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        shelf = Shelf(folder)
        shelf.look(100.0)
        assert names(shelf.look(200.0)) == (["step-1"] if taken else [])
        assert (open_for_writing(scan(folder)) == frozenset()) is taken
        shelf.last_look(201.0, clean_exit=True)
        assert [name for name, reason in shelf.refused if "open for writing" in reason] == ([] if taken else ["step-1"])
        child.communicate()


def test_names_without_a_step_count_only_when_nothing_has_one(
    publish: Put, safetensors_bytes: bytes, folder: Path
) -> None:
    publish("last.safetensors", safetensors_bytes)
    (found,) = Shelf(folder).look(1.0)
    assert (found.name, found.step) == ("last.safetensors", None)
    publish("best.safetensors", safetensors_bytes)
    assert names(Shelf(folder).look(1.0)) == ["last.safetensors"]
    publish("step-5.safetensors", safetensors_bytes[:-1])
    assert names(Shelf(folder).look(1.0)) == ["last.safetensors"]
    publish("step-6.safetensors", safetensors_bytes)
    assert names(Shelf(folder).look(1.0)) == ["step-6.safetensors"]


def test_best_counts_when_it_is_alone(publish: Put, safetensors_bytes: bytes, folder: Path) -> None:
    publish("model_best.safetensors", safetensors_bytes)
    assert names(Shelf(folder).look(1.0)) == ["model_best.safetensors"]


def test_a_copy_that_holds_a_later_step_than_all_others_counts(publish: Put, torch_bytes: bytes, folder: Path) -> None:
    publish("last.ckpt", torch_bytes)
    publish("epoch=0-step=50.ckpt", torch_bytes)
    assert [(found.name, found.step) for found in Shelf(folder).look(1.0)] == [
        ("epoch=0-step=50.ckpt", 50),
        ("last.ckpt", 77),
    ]
    publish("epoch=1-step=77.ckpt", torch_bytes)
    assert names(Shelf(folder).look(1.0)) == ["epoch=0-step=50.ckpt", "epoch=1-step=77.ckpt"]


def test_the_step_of_a_transformers_folder_comes_from_its_state(
    publish: Put, safetensors_bytes: bytes, folder: Path
) -> None:
    state = json.dumps({"global_step": 40}).encode()
    publish("final", {"model.safetensors": safetensors_bytes, "trainer_state.json": state})
    assert [found.step for found in Shelf(folder).look(1.0)] == [40]


# ---- after the trainer has gone


def test_structure_proves_enough_after_the_end(
    in_place: Put, publish: Put, torch_bytes: bytes, safetensors_bytes: bytes, legacy_bytes: bytes, folder: Path
) -> None:
    in_place("step-1.pt", torch_bytes)
    in_place("step-2.safetensors", safetensors_bytes)
    state = b'{"global_step": 3}'
    in_place("checkpoint-3", {"optimizer.pt": torch_bytes, "rng_state.pth": torch_bytes, "trainer_state.json": state})
    publish("step-4.pt", legacy_bytes)
    publish("step-5", {"a.pt": torch_bytes})
    assert names(Shelf(folder).last_look(1.0, clean_exit=False)) == [
        "step-1.pt", "step-2.safetensors", "checkpoint-3", "step-4.pt", "step-5",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["accelerate, 2 ranks", "transformers, 4 ranks"])
def test_what_comes_last_is_enough_once_the_trainer_has_gone(in_place: Put, folder: Path, kind: str) -> None:
    """The first save of a trainer that dies a moment later. While it lives, other ranks may still be writing."""
    tree = trees.FOLDERS[kind]
    path = in_place(tree.name, tree.files)
    alive = Shelf(folder)
    assert alive.look(100.0) == []
    assert names(alive.look(105.0)) == [tree.name]
    assert names(Shelf(folder).last_look(100.0, clean_exit=False)) == [tree.name]
    for last in path.glob("*_0.p*"):
        last.unlink()
    assert Shelf(folder).last_look(100.0, clean_exit=False) == []


@pytest.mark.parametrize("clean", [True, False])
def test_content_that_proves_nothing_needs_a_clean_exit(
    in_place: Put, torch_bytes: bytes, legacy_bytes: bytes, folder: Path, clean: bool
) -> None:
    in_place("step-1.pt", legacy_bytes)
    in_place("step-2", {"a.pt": torch_bytes})
    shelf = Shelf(folder)
    assert names(shelf.last_look(1.0, clean_exit=clean)) == (["step-1.pt", "step-2"] if clean else [])
    assert [name for name, reason in shelf.refused if "nothing proves" in reason] == (
        [] if clean else ["step-1.pt", "step-2"]
    )


def test_or_that_it_was_quiet_before_the_end(in_place: Put, legacy_bytes: bytes, folder: Path) -> None:
    in_place("step-1.pt", legacy_bytes)
    shelf = Shelf(folder)
    shelf.look(100.0)
    assert names(shelf.last_look(105.0, clean_exit=False)) == ["step-1.pt"]


def test_or_the_files_of_an_earlier_one(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    shelf = Shelf(folder)
    in_place("step-1", {"a.pt": torch_bytes, "rng_1.pt": torch_bytes})
    shelf.look(100.0)
    shelf.look(200.0)
    in_place("step-2", {"a.pt": torch_bytes, "rng_2.pt": torch_bytes})
    in_place("step-3", {"a.pt": torch_bytes})
    assert names(shelf.last_look(200.5, clean_exit=False)) == ["step-2"]
    assert [name for name, _ in shelf.refused] == ["step-3"]


def test_what_a_dead_trainer_left_without_proof_never_settles(in_place: Put, legacy_bytes: bytes, folder: Path) -> None:
    path = in_place("step-1.pt", legacy_bytes)
    shelf = Shelf(folder)
    assert shelf.last_look(100.0, clean_exit=False) == []
    assert shelf.look(1000.0) == []
    assert shelf.last_look(1001.0, clean_exit=True) == []
    os.utime(path)
    shelf.look(1002.0)
    assert names(shelf.look(1010.0)) == ["step-1.pt"]


def test_a_look_at_rest_is_cheap(in_place: Put, torch_bytes: bytes, folder: Path) -> None:
    for number in range(5):
        in_place(f"step-{number}.pt", torch_bytes)
        in_place(f"step-{number}0", {"a.pt": torch_bytes, "b.pt": torch_bytes})
    shelf = Shelf(folder)
    for now in range(10):
        shelf.look(float(now))
    times = []
    for now in range(10, 60):
        start = time.perf_counter()
        assert shelf.look(float(now)) == []
        times.append(time.perf_counter() - start)
    assert min(times) < 0.001


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_a_look_at_a_workdir_is_cheap_and_takes_no_data(
    in_place: Put, torch_bytes: bytes, folder: Path, wanted: str
) -> None:
    images = {f"images/train/{number}.jpg": b"" for number in range(3000)}
    in_place("data", {**images, "images/features.pt": torch_bytes})
    in_place(".git", {"objects/model.pt": torch_bytes})
    in_place("tokens", {"train.bin": b"tokens"})
    in_place("train.py", b"import torch")
    in_place("step-1.pt", torch_bytes)
    shelf = Shelf(folder, wanted)
    assert names(shelf.look(0.0) + shelf.look(10.0)) == ["step-1.pt"]
    times = []
    for now in range(11, 40):
        start = time.perf_counter()
        assert shelf.look(float(now)) == []
        times.append(time.perf_counter() - start)
    assert min(times) < 0.001


# ---- before a start


def test_unfinished_work_is_moved_out_of_sight(
    in_place: Put, torch_bytes: bytes, legacy_bytes: bytes, folder: Path, tmp_path: Path
) -> None:
    in_place("step-1.pt", torch_bytes)
    in_place("step-2.pt", torch_bytes[:100])
    in_place("step-3", {"a.pt": torch_bytes, "b.pt": b""})
    (folder / "step-4").mkdir()
    in_place("tmp-checkpoint-5", {"a.pt": torch_bytes})
    in_place("step-6.pt.tmp", torch_bytes)
    in_place(".tmpa1b2c3", b"half a safetensors file")
    in_place("old.pt", legacy_bytes)
    untouched = {
        "config.json": b"{}",
        "step_7.txt": b"",
        "train.log": b"",
        ".hidden": b"",
        "tmpl.yaml": b"",
        "v.bin": b"v",
    }
    for name, data in untouched.items():
        in_place(name, data)
    ours = part_path(folder / "step-9")
    ours.mkdir()
    moved = dict(clear_unfinished(folder, "auto", tmp_path / "aside", keep=10))
    assert set(moved) == {"step-2.pt", "step-3", "step-4", "tmp-checkpoint-5", "step-6.pt.tmp", ".tmpa1b2c3"}
    assert all(moved.values())
    assert set(os.listdir(folder)) == {"step-1.pt", "old.pt", *untouched}
    assert {name.partition("-")[2] for name in os.listdir(tmp_path / "aside")} == set(moved)
    assert clear_unfinished(folder, "auto", tmp_path / "aside") == []


def test_only_the_newest_few_are_kept_aside(in_place: Put, folder: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    for number in range(6):
        in_place("bad", {"a": b"%d" % number})
        set_aside(folder, ["bad", "gone"], aside, keep=2)
    assert [(aside / name / "a").read_bytes() for name in sorted(os.listdir(aside))] == [b"4", b"5"]
    assert os.listdir(folder) == []


def test_nothing_to_move_makes_nothing(folder: Path, tmp_path: Path) -> None:
    assert clear_unfinished(folder, "auto", tmp_path / "aside") == []
    assert clear_unfinished(tmp_path / "gone", "auto", tmp_path / "aside") == []
    assert not (tmp_path / "aside").exists()
