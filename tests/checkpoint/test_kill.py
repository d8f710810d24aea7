"""Real children save with torch and are killed at random moments: whatever the shelf takes must load."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.checkpoint.local import Found, Shelf, clear_unfinished

# torch is imported once; each trainer is a fork of this process. It saves as fast as it can until it is killed.
NURSERY = """
    import os, sys, time, torch
    torch.set_num_threads(1)
    state = {f"w{n}": torch.randn(300, 100) for n in range(12)}

    def in_place(folder, step):
        torch.save(state, f"{folder}/step-{step}.pt")

    def one_name(folder, step):
        torch.save({"iteration": step, **state}, f"{folder}/last.pt")

    def legacy(folder, step):
        torch.save(state, f"{folder}/step-{step}.pt", _use_new_zipfile_serialization=False)

    def folder_in_place(folder, step):
        if step == 1:  # a first one with proof shows which files belong to a checkpoint
            return renamed(folder, step)
        os.mkdir(f"{folder}/step-{step}")
        torch.save(state, f"{folder}/step-{step}/model.pt")
        torch.save(state, f"{folder}/step-{step}/optim.pt")

    def renamed(folder, step):
        os.mkdir(f"{folder}/tmp-{step}")
        torch.save(state, f"{folder}/tmp-{step}/model.pt")
        torch.save(state, f"{folder}/tmp-{step}/optim.pt")
        time.sleep(0.01)  # into a later tick of the file system's clock: that is the proof
        os.rename(f"{folder}/tmp-{step}", f"{folder}/step-{step}")

    for line in sys.stdin:
        way, folder = line.split()
        pid = os.fork()
        if pid == 0:
            for step in range(1, 200):
                globals()[way](folder, step)
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
"""


class Trainer:
    def __init__(self, nursery: subprocess.Popen[str], way: str, folder: Path) -> None:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        self._answers = nursery.stdout
        print(way, folder, file=nursery.stdin, flush=True)
        self._pid = int(self._answers.readline())

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        assert self._answers.readline() == "gone\n"


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(NURSERY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        # Meanwhile, this process imports it as well.
        import torch  # noqa: F401 (see above)

        yield process
        assert process.stdin is not None
        process.stdin.close()


def load(found: Found) -> None:
    """Raises when torch cannot load what was taken, or a file of a folder is missing."""
    import torch

    files = [found.path / name for name in ("model.pt", "optim.pt")] if found.is_dir else [found.path]
    for file in files:
        assert torch.load(file, weights_only=True)["w11"].shape == (300, 100)


@pytest.mark.parametrize(("way", "rounds"), [("in_place", 8), ("one_name", 8), ("folder_in_place", 8), ("renamed", 6)])
def test_after_a_kill_everything_that_is_taken_loads(
    nursery: subprocess.Popen[str], tmp_path: Path, way: str, rounds: int
) -> None:
    taken = 0
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        shelf = Shelf(folder)
        trainer = Trainer(nursery, way, folder)
        during = list[Found]()
        end = time.time() + random.uniform(0.05, 0.2)
        while time.time() < end:
            during += shelf.look(time.time())
            time.sleep(0.01)
        trainer.kill()
        after = shelf.last_look(time.time(), clean_exit=False)
        # What was told during the life of a trainer that has one name has been overwritten since.
        for found in after if way == "one_name" else (during + after)[-4:]:
            load(found)
        taken += len(during) + len(after)
        clear_unfinished(folder, "auto", tmp_path / "aside")
        for found in Shelf(folder).last_look(time.time(), clean_exit=False)[-2:]:
            load(found)
        shutil.rmtree(folder)
    assert way == "one_name" or taken > rounds / 2


def test_a_killed_legacy_save_is_taken_only_with_proof(nursery: subprocess.Popen[str], tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer = Trainer(nursery, "legacy", folder)
        time.sleep(random.uniform(0.02, 0.15))
        trainer.kill()
        shelf = Shelf(folder)
        taken = {found.name for found in shelf.last_look(time.time(), clean_exit=False)}
        last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, default=None)
        assert last is None or last.name not in taken, "nothing follows it"
        assert shelf.look(time.time() + 100) == []
        assert len(shelf.refused) > 0 or not any(file.stat().st_size for file in folder.iterdir())
