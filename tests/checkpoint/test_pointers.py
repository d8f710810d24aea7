"""The files in which trainers look up their newest checkpoint: made to lead to the chosen one, or moved aside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.pointers import dangling, lead_to
from tests.checkpoint import trees
from tests.checkpoint.trees import FILES, FOLDERS

Put = Callable[[str, bytes | dict[str, bytes]], Path]


def test_deepspeed_finds_the_chosen_tag(in_place: Put, folder: Path) -> None:
    tree = trees.deepspeed(2)
    path = in_place(tree.name, tree.files)
    (folder / "latest").write_bytes(b"global_step40\n")
    assert dangling(folder) == ["latest"]
    lead_to(path)
    assert (folder / "latest").read_text() == "global_step30"
    assert dangling(folder) == []
    before = (folder / "latest").stat().st_ino
    lead_to(path)
    assert (folder / "latest").stat().st_ino == before, "right already"


@pytest.mark.parametrize("old", ["nothing", "a link elsewhere", "a broken link", "a file"])
def test_composer_finds_the_chosen_file(in_place: Put, folder: Path, old: str) -> None:
    path = in_place("ep1-ba60-rank0.pt", trees.torch_file())
    in_place("ep2-ba90-rank0.pt", trees.torch_file())
    link = folder / "latest-rank0.pt"
    if old == "a file":
        link.write_bytes(trees.torch_file())
    elif old != "nothing":
        link.symlink_to("gone.pt" if old == "a broken link" else "ep2-ba90-rank0.pt")
    assert dangling(folder) == (["latest-rank0.pt"] if old == "a broken link" else [])
    lead_to(path)
    assert os.readlink(link) == "ep1-ba60-rank0.pt"
    assert sorted(os.listdir(folder)) == ["ep1-ba60-rank0.pt", "ep2-ba90-rank0.pt", "latest-rank0.pt"]


def test_megatron_and_mmengine(in_place: Put, folder: Path) -> None:
    megatron = FOLDERS["megatron"]
    lead_to(in_place(megatron.name, megatron.files))
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "70"
    path = in_place("epoch_4.pth", trees.torch_file())
    lead_to(path)
    assert (folder / "last_checkpoint").read_text() == str(path)
    assert dangling(folder) == []


@pytest.mark.parametrize("kind", ["transformers", "accelerate", "torchtitan", "runner.training"])
def test_the_others_have_none(in_place: Put, folder: Path, kind: str) -> None:
    tree = FOLDERS[kind]
    lead_to(in_place(tree.name, tree.files))
    lead_to(in_place("last.pt", FILES["lightning"][1]))
    lead_to(folder / "gone")
    assert sorted(os.listdir(folder)) == sorted([tree.name, "last.pt"])


def test_an_owners_folder_of_that_name_is_left_alone(in_place: Put, folder: Path) -> None:
    tree = trees.deepspeed(2)
    (folder / "latest").mkdir()
    lead_to(in_place(tree.name, tree.files))
    assert (folder / "latest").is_dir()
    assert dangling(folder) == []


@pytest.mark.parametrize("text", ["", "gone", "/nowhere/at/all", "12", "x" * 5000])
def test_what_leads_nowhere(folder: Path, text: str) -> None:
    (folder / "latest").write_text(text)
    (folder / "last_checkpoint").write_text(str(folder))
    (folder / "notes").write_text("gone")
    assert dangling(folder) == ["latest"]
    assert dangling(folder / "gone") == []


def test_nobody_ever_sees_half_a_pointer(in_place: Put, folder: Path) -> None:
    """Composer without its link, and DeepSpeed with an empty latest, start from scratch."""
    tree = trees.deepspeed(2)
    tags = [in_place(f"global_step{step}", tree.files) for step in (1, 2)]
    files = [in_place(f"ep1-ba{batch}-rank0.pt", trees.torch_file()) for batch in (1, 2)]
    for path in (tags[0], files[0]):
        lead_to(path)
    ended = threading.Event()

    def write() -> None:
        for _ in range(60):
            for path in (*tags, *files):
                lead_to(path)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not ended.is_set():
        assert (folder / "latest").read_text() in ("global_step1", "global_step2")
        assert (folder / "latest-rank0.pt").stat().st_size > 0
        reads += 1
    writer.join()
    assert reads > 0


@pytest.mark.parametrize("name", ["latest", "last_checkpoint", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("content", [b"PK\3\4" + bytes(9000), b"\x80\2}q\0.", b"two\nlines"])
def test_a_file_of_the_owners_with_a_pointers_name(in_place: Put, folder: Path, name: str, content: bytes) -> None:
    in_place(name, content)
    assert dangling(folder) == []
