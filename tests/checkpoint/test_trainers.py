"""Every trainer's checkpoints: complete, and incomplete in every way in which a save can be cut off."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint.formats import Proof, Verdict, judge, step_of
from tests.checkpoint import trees
from tests.checkpoint.trees import FILES, FOLDERS, Tree

Put = Callable[[str, bytes | dict[str, bytes]], Path]
folders = pytest.mark.parametrize("tree", FOLDERS.values(), ids=FOLDERS)


def step(path: Path, verdict: Verdict) -> int | None:
    named = step_of(path.name)
    return verdict.step if named is None else named


@folders
def test_a_complete_folder(in_place: Put, tree: Tree) -> None:
    path = in_place(tree.name, tree.files)
    verdict = judge(path)
    assert (verdict.complete, verdict.format, verdict.reason) == (True, tree.format, "")
    assert verdict.proof is Proof[tree.proof]
    assert step(path, verdict) == tree.step


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ("transformers", "transformers"), ("transformers", "transformers, FSDP"), ("accelerate", "accelerate"),
        ("deepspeed", "deepspeed, ZeRO 2"), ("dcp", "torchtitan"), ("lightning", "lightning, FSDP"),
        ("composer", "composer, FSDP"), ("any", "transformers"), ("any", "accelerate"),
    ],
)  # fmt: skip
def test_the_owner_may_name_the_format(in_place: Put, wanted: str, kind: str) -> None:
    tree = FOLDERS[kind]
    assert judge(in_place(tree.name, tree.files), wanted).complete
    if wanted != "any":
        other = judge(in_place("step-1", {"note.pt": trees.torch_file()}), wanted)
        assert not other.complete
        assert other.reason.startswith("has no ") or wanted == "lightning"


@folders
def test_a_folder_that_misses_a_file_is_not_complete(in_place: Put, tree: Tree) -> None:
    for name in tree.files.keys() - tree.optional:
        path = in_place(tree.name, tree.files)
        (path / name).unlink()
        verdict = judge(path)
        # Without what tells whose it is, it is a folder of good files: these must be quiet.
        assert not verdict.complete or verdict.proof is Proof.NOTHING, name
        assert verdict.reason or verdict.format in ("folder", "megatron", "lightning"), name
        shutil.rmtree(path)


@folders
def test_a_save_cut_off_after_any_file_proves_nothing(in_place: Put, tree: Tree) -> None:
    """In the trainer's order, and with ranks that finish in another order."""
    names = list(tree.files)
    needed = [name for name in names if name not in tree.optional]
    for count in range(len(names)):
        path = in_place(tree.name, dict(itertools.islice(tree.files.items(), count)))
        verdict = judge(path)
        ended = not set(needed) - set(names[:count])
        assert ended or not verdict.complete or verdict.proof is Proof.NOTHING, names[:count]
        if path.exists():
            shutil.rmtree(path)


@folders
def test_a_file_that_is_cut_short_spoils_its_folder(in_place: Put, tree: Tree) -> None:
    for name, data in tree.files.items():
        if name.endswith((".py", "latest")) or data == b"{}":
            continue
        verdict = judge(in_place(tree.name, {**tree.files, name: data[:-1]}))
        assert not verdict.complete, name
        assert verdict.reason, name


@folders
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_never_accepted(folder: Path, tree: Tree, data: st.DataObject) -> None:
    telling = [
        name for name, content in tree.files.items() if not name.endswith((".py", "latest")) and content != b"{}"
    ]
    name = data.draw(st.sampled_from(telling))
    end = data.draw(st.integers(0, len(tree.files[name]) - 1))
    path = folder / tree.name
    for member, content in tree.files.items():
        (path / member).parent.mkdir(parents=True, exist_ok=True)
        (path / member).write_bytes(content[:end] if member == name else content)
    assert not judge(path).complete


@folders
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_subset_of_the_files_proves_its_end_only_with_all_that_counts(
    folder: Path, tree: Tree, data: st.DataObject
) -> None:
    """Ranks write side by side, so every order of writing occurs."""
    there = data.draw(st.sets(st.sampled_from(sorted(tree.files)), min_size=1))
    path = folder / tree.name
    shutil.rmtree(path, ignore_errors=True)
    for member in there:
        (path / member).parent.mkdir(parents=True, exist_ok=True)
        (path / member).write_bytes(tree.files[member])
    verdict = judge(path)
    missing = tree.files.keys() - there - tree.optional
    assert not missing or not verdict.complete or verdict.proof is Proof.NOTHING, missing


@pytest.mark.parametrize("kind", FILES)
def test_a_complete_file_and_every_shorter_one(in_place: Put, kind: str) -> None:
    name, data, known_as, tells = FILES[kind]
    path = in_place(name, data)
    verdict = judge(path)
    assert (verdict.complete, verdict.format, step(path, verdict)) == (True, known_as, tells)
    assert verdict.proof is Proof.WHOLE
    for end in range(0, len(data), 7):
        assert not judge(in_place(name, data[:end])).complete, end


# ---- what only one of them has


def test_transformers_and_the_wrong_step(in_place: Put) -> None:
    files = trees.transformers(20).files
    assert "of step 20" in judge(in_place("checkpoint-21", files)).reason
    assert judge(in_place("final", files)).step == 20
    for state in (b'{"global', b"[]", b"{}", b'{"global_step": true}', b'{"global_step": -1}'):
        assert not judge(in_place("checkpoint-22", {**files, "trainer_state.json": state})).complete


@pytest.mark.parametrize(("gone", "what"), [("optimizer.pt", "optimizer"), ("rng_state.pth", "random state")])
def test_transformers_without_what_it_would_silently_make_anew(in_place: Put, gone: str, what: str) -> None:
    """Unless its owner wants to save the model only."""
    files = {name: data for name, data in trees.transformers(20).files.items() if name != gone}
    assert judge(in_place("checkpoint-20", files)).reason.startswith(f"has no {what}")
    wanted = {**files, "training_args.bin": trees.torch_file(save_only_model=True)}
    assert judge(in_place("checkpoint-20", wanted)).complete


@pytest.mark.parametrize("marker", ["checkpoint-is-incomplete.txt", "optimizer.pt.tmp", ".tmpa1b2"])
def test_a_marker_says_that_the_save_has_not_ended(in_place: Put, marker: str) -> None:
    verdict = judge(in_place("checkpoint-20", {**trees.transformers(20).files, marker: b"x"}))
    assert marker in verdict.reason


def test_a_gap_between_the_ranks(in_place: Put) -> None:
    four = trees.transformers(20, ranks=4).files
    for rank in range(3):
        files = {name: data for name, data in four.items() if name != f"rng_state_{rank}.pth"}
        assert judge(in_place(f"checkpoint-{rank}", files | {"trainer_state.json": trees.state_json(rank)})).reason == (
            f"rng_state_{rank}.pth is missing"
        )
    alone = {name: data for name, data in four.items() if name not in [f"rng_state_{rank}.pth" for rank in (1, 2, 3)]}
    assert judge(in_place("checkpoint-20", alone)).reason == "rng_state_1.pth is missing"


def test_the_shards_tell_how_many_random_states_there_must_be(in_place: Put) -> None:
    files = {
        **trees.below("pytorch_model_fsdp_0", trees.dcp()),
        **trees.below("optimizer_0", trees.dcp()),
        "random_states_0.pkl": trees.torch_file(),
    }
    assert judge(in_place("step-1", files)).reason == "random_states_1.pkl is missing"
    assert judge(in_place("step-1", {"random_states_1.pkl": trees.torch_file()})).proof is Proof.LAST


def test_a_shard_that_is_shorter_than_the_metadata_says(in_place: Put) -> None:
    for size in (0, 49):
        verdict = judge(in_place("step-40", {**trees.dcp(), "__1_0.distcp": b"s" * size}))
        assert not verdict.complete
        assert "__1_0.distcp" in verdict.reason
    assert judge(in_place("step-40", {**trees.dcp(), "__1_0.distcp": b"s" * 51})).complete


def test_metadata_that_tells_no_places_must_be_quiet(in_place: Put) -> None:
    files = {"__0_0.distcp": b"1", ".metadata": pickle.dumps({"a": "__0_0.distcp"})}
    assert judge(in_place("step-1", files)).proof is Proof.NOTHING
    shutil.rmtree(in_place("step-1", files))
    gone = judge(in_place("step-1", {".metadata": files[".metadata"]}))
    assert gone.reason == "__0_0.distcp is missing"


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_as_metadata_is_a_verdict_and_no_crash(folder: Path, garbage: bytes) -> None:
    path = folder / "step-1"
    path.mkdir(exist_ok=True)
    (path / "__0_0.distcp").write_bytes(b"shard")
    (path / ".metadata").write_bytes(b"\x80\x04" + garbage + b".")
    verdict = judge(path)
    assert not verdict.complete or verdict.proof is Proof.NOTHING


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_itself_saves(folder: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"w": torch.arange(100.0), "o": {"n": 5}}, checkpoint_id=str(folder / "step-9"), no_dist=True)
    verdict = judge(folder / "step-9", "dcp")
    assert (verdict.complete, verdict.format, verdict.proof) == (True, "dcp", Proof.WHOLE)
    shard = folder / "step-9" / "__0_0.distcp"
    whole = shard.read_bytes()
    for end in range(len(whole)):
        shard.write_bytes(whole[:end])
        assert not judge(folder / "step-9").complete, end


def test_deepspeed_that_has_not_told_how_many_ranks_there_are(in_place: Put) -> None:
    """Old torch files are not looked into: the numbers of the files must do, and quiet."""
    whole = trees.zero(30, ranks=3)
    silent = {**whole, "mp_rank_00_model_states.pt": trees.torch_file()}
    assert judge(in_place("global_step30", silent)).proof is Proof.NOTHING
    verdict = judge(in_place("global_step31", {n: d for n, d in silent.items() if "rank_1" not in n}))
    assert verdict.complete is False or verdict.proof is Proof.NOTHING


def test_a_finished_run_of_ultralytics_cannot_be_resumed(in_place: Put, folder: Path) -> None:
    last = in_place("last.pt", trees.ultralytics(7))
    assert (judge(last).format, judge(last).step, judge(last, "ultralytics").complete) == ("ultralytics", 7, True)
    stripped = in_place("last.pt", trees.ultralytics(-1))
    for wanted in ("auto", "ultralytics", "any"):
        verdict = judge(stripped, wanted)
        assert (verdict.complete, verdict.format) == (False, "other"), "it is its owner's model, to be left alone"
        assert "finished run" in verdict.reason
    assert judge(in_place("epoch3.pt", trees.ultralytics(3))).step == 3


def test_runner_training_and_a_list_that_does_not_fit(in_place: Put) -> None:
    tree = trees.training()
    lists: tuple[object, ...] = ({}, [], {"state.safetensors": 1}, {"gone": 4}, {"state.safetensors": True})
    for files in lists:
        state = json.dumps({"format": "cloudrun-training", "step": 80, "files": files}).encode()
        assert not judge(in_place(tree.name, {**tree.files, "state.json": state})).complete
    shutil.rmtree(in_place(tree.name, tree.files))
    only = {"state.safetensors": trees.safetensors()}
    assert judge(in_place(tree.name, only)).reason == "has no state.json, which is written last"


def test_shards_that_an_index_names_must_be_there(in_place: Put, torch_bytes: bytes) -> None:
    tree = FOLDERS["transformers, sharded weights"]
    path = in_place(tree.name, tree.files)
    (path / "model-2-of-2.safetensors").unlink()
    assert "model-2-of-2.safetensors is missing" in judge(path).reason
    index = json.dumps({"weight_map": {"a": "m-1.bin", "b": "m-2.bin"}}).encode()
    members = {"m.bin.index.json": index, "m-1.bin": torch_bytes}
    assert "m-2.bin is missing" in judge(in_place("step-1", members)).reason
    assert judge(in_place("step-1", {"m-2.bin": torch_bytes})).complete


def test_the_format_that_was_asked_for_needs_its_own_file(in_place: Put) -> None:
    path = in_place("global_step5", {"optimizer.bin": trees.torch_file()})
    assert judge(path, "accelerate").reason.startswith("has no random_states_0.pkl")
    assert judge(path, "deepspeed").reason == "has no DeepSpeed states"
    assert judge(path, "dcp").reason == "has no .metadata"
    assert judge(path, "transformers").reason.startswith("has no trainer_state.json")
    assert judge(path, "composer").reason == "has no .metadata"
