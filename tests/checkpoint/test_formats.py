"""What is a complete checkpoint, told from names and bytes: tables, and every way to cut a file short."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.formats import FORMATS, Proof, Verdict, is_never, judge, looks_like_checkpoint, step_of
from runner.checkpoint.formats.content import Content
from tests.checkpoint import trees

Put = Callable[[str, bytes | dict[str, bytes]], Path]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-12", 12), ("step_12", 12), ("step12.pt", 12), ("step=12.ckpt", 12), ("steps-12.pt", 12),
        ("checkpoint-12", 12), ("checkpoint-12.pth.tar", 12), ("global_step12", 12), ("global_step_12.pt", 12),
        ("epoch=3-step=12.ckpt", 12), ("step=12-epoch=3.ckpt", 12), ("epoch_3_step_12.pt", 12),
        ("iter_12", 12), ("iter_0000012", 12), ("iteration-12.pt", 12), ("ep3-ba120-rank0.pt", 120),
        ("ckpt-12.pt", 12), ("ckpt_12.pt", 12), ("model_12.pt", 12), ("model_0004999.pth", 4999),
        ("hpc_ckpt_4.ckpt", 4), ("checkpoint_3_500.pt", 500), ("checkpoint12.pt", 12), ("000012.pt", 12),
        ("epoch_5.pth", 5), ("epoch=5.ckpt", 5), ("epoch5.pt", 5), ("best_epoch_5.pt", 5),
        ("epoch=05-val_loss=0.12.ckpt", 5), ("val_loss=0.12-epoch=3.ckpt", 3), ("Step-12.PT", 12),
        ("epoch=3-step=12-v1.ckpt", 12), ("step-000000001200.a7-3f9c2d", 1200),
        ("last.ckpt", None), ("last-v1.ckpt", None), ("best.pt", None), ("final.pt", None), ("model.safetensors", None),
        ("model_7b.pt", None), ("resnet50.pt", None), ("yolov8n.pt", None), ("timestep_12", None), ("2024", None),
        ("model-00001-of-00004.safetensors", None), ("step-" + "9" * 40, None), ("", None), ("step-", None),
    ],
)  # fmt: skip
def test_steps_in_names(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize("name", [".x", "tmp", "tmp-checkpoint-5", "tmpabc.pt", "a.tmp", "a.pt.part", "step-5.partial"])
def test_names_that_are_never_checkpoints(name: str) -> None:
    assert is_never(name)
    assert not looks_like_checkpoint(name, is_dir=False)


@pytest.mark.parametrize(
    ("name", "is_dir", "looks"),
    [
        ("a.pt", False, True), ("a.PTH", False, True), ("a.pth.tar", False, True), ("a.ckpt", False, True),
        ("a.bin", False, True), ("a.safetensors", False, True), ("step_12", False, True), ("step_12", True, True),
        ("config.json", False, False), ("a.pt", True, False), ("logs", True, False),
    ],
)  # fmt: skip
def test_what_a_name_suggests(name: str, is_dir: bool, looks: bool) -> None:
    assert looks_like_checkpoint(name, is_dir=is_dir) is looks


def whole(verdict: Verdict) -> tuple[bool, str, bool]:
    """Complete, of which format, and proved by its structure alone."""
    return verdict.complete, verdict.format, verdict.proof is Proof.WHOLE


def test_whole_files(
    in_place: Put, torch_bytes: bytes, legacy_bytes: bytes, safetensors_bytes: bytes, folder: Path
) -> None:
    in_place("a.pt", torch_bytes)
    in_place("step_1", torch_bytes)
    in_place("old.pt", legacy_bytes)
    in_place("plain.ckpt", pickle.dumps({"w": 1}))
    in_place("a.safetensors", safetensors_bytes)
    assert whole(judge(folder / "a.pt")) == (True, "torch", True)
    assert whole(judge(folder / "step_1")) == (True, "torch", True)
    assert whole(judge(folder / "old.pt")) == (True, "pickle", False)
    assert whole(judge(folder / "plain.ckpt")) == (True, "pickle", False)
    assert whole(judge(folder / "a.safetensors")) == (True, "safetensors", True)


def cuts(data: bytes) -> list[int]:
    """Every offset near the beginning, the end, and whatever stands between zip entries; some in between."""
    marks = {0, 1, 4, 8, 30, 100, len(data) // 2}
    for magic in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"):
        at = data.find(magic)
        while at >= 0:
            marks |= {at, at + 1, at + 4, at + 29}
            at = data.find(magic, at + 1)
    marks |= set(range(max(0, len(data) - 60), len(data))) | set(range(0, len(data), max(1, len(data) // 200)))
    return sorted(mark for mark in marks if mark < len(data))


@pytest.mark.parametrize("wanted", ["auto", "any"])
def test_a_torch_file_that_is_cut_anywhere_is_not_complete(in_place: Put, torch_bytes: bytes, wanted: str) -> None:
    for end in cuts(torch_bytes):
        verdict = judge(in_place("step-1.pt", torch_bytes[:end]), wanted)
        assert not verdict.complete, (end, verdict)
        assert verdict.reason


def test_a_safetensors_file_that_is_cut_anywhere_is_not_complete(in_place: Put, safetensors_bytes: bytes) -> None:
    for wanted in ("auto", "any"):
        for end in range(len(safetensors_bytes)):
            assert not judge(in_place("a.safetensors", safetensors_bytes[:end]), wanted).complete, end


def test_holes_of_zeros_in_the_structure_are_seen(in_place: Put, torch_bytes: bytes, safetensors_bytes: bytes) -> None:
    for magic in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"):
        at = torch_bytes.find(magic)
        while at >= 0:
            holed = torch_bytes[:at] + bytes(4) + torch_bytes[at + 4 :]
            assert not judge(in_place("a.pt", holed)).complete, (magic, at)
            at = torch_bytes.find(magic, at + 1)
    for zeros in (bytes(len(torch_bytes)), bytes(4096) + torch_bytes[4096:], torch_bytes[:4096] + bytes(9000)):
        assert not judge(in_place("a.pt", zeros)).complete
    assert not judge(in_place("a.safetensors", bytes(20) + safetensors_bytes[20:])).complete
    assert not judge(in_place("a.safetensors", bytes(len(safetensors_bytes)))).complete


def test_bytes_that_do_not_belong_there_are_seen(in_place: Put, torch_bytes: bytes, safetensors_bytes: bytes) -> None:
    assert not judge(in_place("a.pt", b"x" + torch_bytes)).complete
    assert not judge(in_place("a.pt", torch_bytes + b"\0")).complete
    assert not judge(in_place("a.pt", torch_bytes[:-22] + torch_bytes)).complete
    assert not judge(in_place("a.safetensors", safetensors_bytes + b"\0")).complete


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b'{"a": 1}', b'{"a": {}}', b'{"a": {"data_offsets": [4, 0]}}', b'{"a": {"data_offsets": [-1, 0]}}',
        b'{"a": {"data_offsets": ["x", 0]}}', b'{"a": {"data_offsets": [0, true]}}', b'{"a": {"data_offsets": [0]}}',
        b"[" * 100_000, b"\xff\xfe{}", b'{"a": {"data_offsets": [0, 999999999999999999999]}}',
    ],
)  # fmt: skip
def test_hostile_safetensors_headers(in_place: Put, header: bytes) -> None:
    assert not judge(in_place("a.safetensors", len(header).to_bytes(8, "little") + header)).complete


def zip_of(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, data in files.items():
            opened.writestr(name, data)
    return buffer.getvalue()


def test_a_zip_of_another_kind_counts_only_as_any(in_place: Put) -> None:
    path = in_place("step_1.npz", zip_of(a=b"1"))
    assert not judge(path, "auto").complete
    assert judge(path, "auto").format == "other"
    assert whole(judge(path, "any")) == (True, "any", False)


def test_an_empty_zip_is_no_torch_file(in_place: Put) -> None:
    assert not judge(in_place("a.pt", zip_of())).complete


def test_unknown_content(in_place: Put) -> None:
    path = in_place("step_1.json", b'{"step": 1}')
    assert whole(judge(path, "any")) == (True, "any", False)
    assert judge(path, "auto") == Verdict(
        complete=False, format="other", reason="is neither a torch file nor safetensors"
    )
    assert not judge(in_place("step_2.json", b""), "any").complete


@pytest.mark.parametrize("wanted", ["torch", "ultralytics", "composer"])
def test_format_torch_takes_torch_only(
    in_place: Put, torch_bytes: bytes, safetensors_bytes: bytes, wanted: str
) -> None:
    assert judge(in_place("a.pt", torch_bytes), wanted).complete
    assert not judge(in_place("a.safetensors", safetensors_bytes), wanted).complete
    assert not judge(in_place("a.json", b"{}"), wanted).complete
    folder = judge(in_place("step-1", {"model.pt": torch_bytes, "note.txt": b"x"}), wanted)
    assert folder.complete is (wanted != "composer"), "its folders are shards"
    assert not judge(in_place("step-2", {"note.txt": b"x"}), wanted).complete


@pytest.mark.parametrize("wanted", FORMATS)
def test_what_is_not_there_or_empty_is_never_complete(folder: Path, in_place: Put, wanted: str) -> None:
    (folder / "step-1").mkdir()
    assert not judge(folder / "gone", wanted).complete
    assert not judge(folder / "step-1", wanted).complete
    assert not judge(in_place("step-2.pt", b""), wanted).complete
    assert not judge(in_place("step-3", {"model.pt": b""}), wanted).complete


def test_a_folder_of_whole_files_must_settle(in_place: Put, torch_bytes: bytes, safetensors_bytes: bytes) -> None:
    path = in_place("step-1", {"a.pt": torch_bytes, "deep/b.safetensors": safetensors_bytes, "config.json": b"{}"})
    assert whole(judge(path)) == (True, "folder", False)


@pytest.mark.parametrize(
    ("member", "data"),
    [
        ("a.pt", b"PK\x03\x04rest"), ("a.pt", b"text"), ("a.pt", b""), ("a.bin", bytes(100)), ("a.safetensors", b"x"),
        ("deep/b.pth", b""), ("x.tmp", b"1"), (".tmp123", b"1"), ("a.pt.part", b"1"), ("deep/tmpfile", b"1"),
        ("checkpoint-is-incomplete.txt", b"1"), ("a.incomplete", b"1"), ("rank_0.pkl", b""), ("x.zip", b"PK\x03\x04"),
    ],
)  # fmt: skip
def test_one_bad_member_spoils_a_folder(in_place: Put, torch_bytes: bytes, member: str, data: bytes) -> None:
    verdict = judge(in_place("step-1", {"good.pt": torch_bytes, member: data}))
    assert not verdict.complete
    assert member in verdict.reason


def test_folders_that_are_no_checkpoints(in_place: Put, torch_bytes: bytes) -> None:
    logs = in_place("lightning_logs", {"version_0/checkpoints/last.ckpt": torch_bytes})
    assert judge(logs).format == "other"
    assert not judge(logs).complete
    assert judge(in_place("model", {"model.pt": torch_bytes})).complete
    assert judge(in_place("model", {"pytorch_model.bin": torch_bytes})).complete


@pytest.mark.parametrize("wanted", ["auto", "torch", "transformers"])
def test_a_folder_of_binary_data_is_no_checkpoint(in_place: Put, wanted: str) -> None:
    tokens = in_place("openwebtext", {"train.bin": b"tokens", "val.bin": b"tokens", "prepare.py": b"x"})
    assert judge(tokens, wanted).format == "other"


def test_the_step_inside_a_torch_file(in_place: Put, torch_bytes: bytes, safetensors_bytes: bytes) -> None:
    assert judge(in_place("last.ckpt", torch_bytes)).step == 77
    assert judge(in_place("a.safetensors", safetensors_bytes)).step is None
    evil = zip_of(**{"x/data.pkl": b"\x80\x02X\x0b\x00\x00\x00global_stepgarbage"})
    assert judge(in_place("evil.ckpt", evil)).step is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("number", [0, 1, 255, 256, 65536, 2**31 - 1, 2**31, 2**40])
def test_every_way_in_which_a_pickle_lays_down_a_number(protocol: int, number: int) -> None:
    value = "global_step ".strip()  # another object: pickle writes it out, and the key as well
    state = {"lr": 0.1, "steps": value, "xglobal_step": 5, "global_step": number, "epoch": -1}
    found = Content("torch", pickle.dumps(state, protocol))
    assert found.number("global_step") == number
    assert found.number("missing", "epoch") == -1
    assert found.number("lr", "steps") is None


@pytest.mark.parametrize(("protocol", "only"), [(2, True), (2, False), (4, True)])
def test_yes_or_no_in_a_pickle(protocol: int, only: bool) -> None:
    found = Content("torch", pickle.dumps({"a": 1, "save_only_model": only}, protocol))
    assert found.says("save_only_model") is only
    assert not found.says("a")


def test_nothing_is_ever_unpickled(in_place: Put, folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(folder / "boom"),)

    bomb = pickle.dumps({"global_step": Bomb()})
    for wanted in FORMATS:
        judge(in_place("a.pt", bomb), wanted)
        judge(in_place("step-1", {"a.pt": zip_of(**{"x/data.pkl": bomb}), ".metadata": bomb}), wanted)
        judge(in_place("last.ckpt", zip_of(**{"x/data.pkl": bomb + b"pytorch-lightning_version ultralytics"})), wanted)
    assert not (folder / "boom").exists()


@pytest.mark.parametrize("told", [b"[1, 2]", b'{"a": 1}\n{"a": 2}\n', b"", b'{"format": "another"}'])
def test_a_state_json_of_another_trainer_says_nothing(tmp_path: Path, told: bytes) -> None:
    folder = tmp_path / "step_100"
    folder.mkdir()
    (folder / "model.pt").write_bytes(trees.torch_file())
    (folder / "state.json").write_bytes(told)
    assert judge(folder).complete
    assert judge(folder).format != "cloudrun-training"


def test_a_step_below_zero_is_none(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(trees.torch_file(global_step=-1))
    assert (judge(tmp_path / "last.pt").complete, judge(tmp_path / "last.pt").step) == (True, None)
