"""Checkpoints in several folders: what a pattern matches, under which names, and back to the same places."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from runner.checkpoint.layout import StoreLayout, checkpoint_id
from runner.checkpoint.local import Shelf, scan, set_aside
from runner.checkpoint.places import Places
from runner.checkpoint.restore import restore
from runner.checkpoint.stored import list_stored
from runner.checkpoint.upload import Facts, upload
from runner.core.state import Checkpoint
from runner.storage.memory import MemoryStore
from tests.checkpoint import trees
from tests.checkpoint.conftest import write

LAYOUT = StoreLayout("digits")
NEVER = threading.Event()


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """The folders of three trainers, and things that are none of ours."""
    work = tmp_path / "work"
    last, named = trees.ultralytics(4), trees.transformers(20)
    lightning = trees.FILES["lightning"][1]
    tree: dict[str, bytes | dict[str, bytes]] = {
        "outputs/checkpoint-20": dict(named.files),
        "outputs/runs/events.out": b"log",
        "runs/detect/train/weights/last.pt": last,
        "runs/detect/train/weights/best.pt": last,
        "runs/detect/train2/weights/last.pt": last,
        "runs/detect/train/labels.jpg": b"",
        "lightning_logs/version_0/checkpoints/epoch=0-step=50.ckpt": lightning,
        "lightning_logs/version_0/hparams.yaml": b"",
        ".hidden/checkpoints/step-1.pt": last,
        "tmp/checkpoints/step-1.pt": last,
        "model.pt": last,
    }
    for name, content in tree.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        write(work / name, content)
    return work


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("outputs/checkpoint-*",), ["outputs/checkpoint-20"]),
        (
            ("runs/detect/*/weights/*.pt",),
            [
                "runs/detect/train/weights/best.pt",
                "runs/detect/train/weights/last.pt",
                "runs/detect/train2/weights/last.pt",
            ],
        ),
        (
            ("lightning_logs/version_*/checkpoints/*.ckpt", "outputs/checkpoint-*/"),
            ["lightning_logs/version_0/checkpoints/epoch=0-step=50.ckpt", "outputs/checkpoint-20"],
        ),
        (("runs/detect/train/weights/last.pt", "runs/*/train/weights/last.pt"), ["runs/detect/train/weights/last.pt"]),
        (("*/checkpoints/*.pt", "gone/*/x", "model.pt/*"), []),
        (("*",), ["lightning_logs", "model.pt", "outputs", "runs"]),
    ],
)
def test_what_a_pattern_matches(workdir: Path, patterns: tuple[str, ...], names: list[str]) -> None:
    assert [name for name, _ in Places(workdir, patterns).entries()] == names


def test_links_are_never_followed(workdir: Path, tmp_path: Path) -> None:
    shutil.move(workdir / "runs/detect", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", workdir / "runs/detect")
    os.symlink("checkpoint-20", workdir / "outputs/checkpoint-30")
    places = Places(workdir, ("runs/*/*/weights/*.pt", "runs/detect/train/weights/*.pt", "outputs/checkpoint-*"))
    assert [name for name, _ in places.entries()] == ["outputs/checkpoint-20"]


def test_the_folders_that_hold_checkpoints(workdir: Path) -> None:
    places = Places(workdir, ("runs/detect/*/weights/*.pt", "outputs/checkpoint-*", "gone/*.pt"))
    assert places.folders() == [
        workdir / "outputs",
        workdir / "runs/detect/train/weights",
        workdir / "runs/detect/train2/weights",
    ]
    assert Places(workdir).folders() == [workdir]


def test_a_shelf_of_several_folders(workdir: Path) -> None:
    places = Places(workdir, ("outputs/checkpoint-*", "lightning_logs/*/checkpoints/*.ckpt"))
    shelf = Shelf(places)
    assert [(found.name, found.step) for found in shelf.look(100.0)] == [
        ("outputs/checkpoint-20", 20),
        ("lightning_logs/version_0/checkpoints/epoch=0-step=50.ckpt", 50),
    ]
    (workdir / "lightning_logs/version_0/checkpoints/last.ckpt").write_bytes(trees.torch_file(global_step=10))
    assert shelf.look(200.0) == [], "it is older than what tells its step in its name"


def test_they_come_back_to_the_same_places(workdir: Path, tmp_path: Path) -> None:
    store, places = MemoryStore(), Places(workdir, ("runs/detect/*/weights/last.pt", "outputs/checkpoint-*"))
    for number, found in enumerate(scan(places), start=1):
        facts = Facts(1.7e9, "", "", "")
        upload(store, LAYOUT, 1, checkpoint_id(number, 1, "abcdef"), found, facts=facts, stop=NEVER)
    other = tmp_path / "other"
    for checkpoint in list_stored(store, LAYOUT, 1):
        assert isinstance(checkpoint, Checkpoint)
        path = restore(store, LAYOUT, 1, checkpoint, other, stop=NEVER)
        assert path == other / checkpoint.name
    there = {found.name: found.signature for found in scan(Places(other, places.patterns))}
    assert there == {found.name: found.signature for found in scan(places)}
    assert len(there) == 3


def test_what_is_set_aside_keeps_its_whole_name(workdir: Path, tmp_path: Path) -> None:
    names = ["runs/detect/train/weights/last.pt", "outputs/checkpoint-20"]
    set_aside(workdir, names, tmp_path / "aside")
    assert sorted(os.listdir(tmp_path / "aside")) == [
        "000001-runs--detect--train--weights--last.pt",
        "000002-outputs--checkpoint-20",
    ]
    assert (workdir / "runs/detect/train/weights/best.pt").exists()


def test_what_lies_deep_is_set_aside_under_a_name_that_fits(tmp_path: Path) -> None:
    deep = "/".join(["f" * 90] * 3 + ["last.pt"])
    (tmp_path / deep).parent.mkdir(parents=True)
    (tmp_path / deep).write_bytes(b"half")
    set_aside(tmp_path, [deep], tmp_path / "aside")
    (there,) = os.listdir(tmp_path / "aside")
    assert there.startswith("000001-")
    assert there.endswith("--last.pt")
    assert len(there) < 256
