"""Several ranks: they save and stop together, and their number may change."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runner.training import state_digest
from runner.training.convert import converted
from tests.training.killing import Life, begun, finish, outcome, reached


def _look(life: Life, world: int, attempt: int) -> str:
    look = replace(life, kind="sharded look", world=world, attempt=attempt)
    finish(look)
    return look.end.read_text()


def test_sharded_weights_and_optimizer_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    life = Life("fully sharded", tmp_path, total=5, world=2)
    finish(life)
    folder = tmp_path / "step-000000000005"
    whole = converted(folder)
    expected = state_digest({"step": 5, **whole["state"], "model": dict(whole["state"]["model"])}, full=True)
    assert _look(life, 1, 1) == expected
    assert _look(life, 3, 2) == expected
    torch.save(whole, tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=True)["state"]["model"]["0.weight"].shape == (17, 6)


def test_what_lies_on_the_disk(tmp_path: Path) -> None:
    finish(Life("data parallel", tmp_path, total=3, world=2))
    folder = tmp_path / "step-000000000003"
    names = ["rank-00001.json", "rank-00001.safetensors", "state.json", "state.safetensors"]
    assert sorted(os.listdir(folder)) == names
    files = json.loads((folder / "state.json").read_bytes())["files"]
    assert files == {name: (folder / name).stat().st_size for name in names if name != "state.json"}
    assert (folder / "rank-00001.safetensors").stat().st_size < 20_000


@pytest.mark.parametrize("world", [1, 3])
def test_data_goes_on_with_another_number_of_ranks(tmp_path: Path, world: int) -> None:
    """50 points: two ranks take 8 of them at each step, the others what is left of the epoch, none twice."""
    life = Life("data parallel", tmp_path, total=3, world=2)
    finish(life)
    finish(replace(life, total=6, world=world, attempt=1))
    seen = [line.split() for rank in range(3) for line in _lines(replace(life, rank=rank))]
    assert len(seen) == 3 * 2 + 3 * world
    assert len({digest for _, digest in seen}) == len(seen)


def _lines(life: Life) -> list[str]:
    return life.seen.read_text().splitlines() if life.seen.exists() else []


def test_one_rank_that_is_asked_to_stop_stops_all_at_one_step(tmp_path: Path) -> None:
    life = Life("stopped", tmp_path, world=2)
    with begun(life) as processes:
        while reached(life) < 3:
            assert all(process.is_alive() for process in processes)
            time.sleep(0.01)
        asked = processes[1].pid
        assert asked is not None
        os.kill(asked, signal.SIGUSR1)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    _, ends = outcome(life)
    assert ends[0] == ends[1]
    assert (tmp_path / f"step-{int(ends[0]):012d}" / "rank-00001.json").exists()
