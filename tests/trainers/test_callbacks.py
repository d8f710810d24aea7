"""The callbacks of runner.training in real trainers, with the supervisor's own end of the socket."""

from __future__ import annotations

import os
import queue
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.supervisor.channel import Channel, Hello, Message, Progress, Saved
from tests.e2e.machine import ROOT
from tests.trainers.harness import CONFIGS, ON_CPU, PYTHON, Trainer
from tests.trainers.table import TRAINERS

TRANSFORMERS, LIGHTNING = TRAINERS["transformers"], TRAINERS["lightning"]
NOTHING_SHARED = {"version": 1, "shared_memory": None, "room": 0, "why_not": "not here"}


@dataclass
class Supervisor:
    """The real end of the socket, and what it has heard."""

    channel: Channel
    address: Path
    heard: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    complaints: list[str] = field(default_factory=list)

    def wait_for(self, kind: type[Any]) -> Any:
        while not isinstance(message := self.heard.get(timeout=90.0), kind):
            pass
        return message


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    complaints: list[str] = []
    channel = Channel(lambda rank, message: heard.put(message), lambda: NOTHING_SHARED, complaints.append)
    yield Supervisor(channel, channel.open(tmp_path / "socket"), heard, complaints)
    channel.close()


@contextmanager
def training(folder: Path, script: str, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDRUN_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ON_CPU}", **variables}
    with (folder / "output").open("w") as out:
        child = subprocess.Popen([PYTHON, "train.py", *words], cwd=folder, env=env, stdout=out, stderr=out, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def with_callback(trainer: Trainer) -> str:
    """Its script with the two lines that a user adds."""
    script = (CONFIGS / trainer.name / "train.py").read_text()
    script = script.replace("parser =", f"from runner.training.{trainer.name} import CloudrunCallback\nparser =", 1)
    return script.replace("Steps()]", "Steps(), CloudrunCallback()]")


@pytest.mark.parametrize("trainer", [TRANSFORMERS, LIGHTNING], ids=lambda one: one.name)
def test_progress_a_save_when_asked_and_an_end_when_told(
    tmp_path: Path, supervisor: Supervisor, trainer: Trainer
) -> None:
    trainer.require()
    words = ("--steps", "100000", "--save_steps", "90000", "--delay", "0.01")
    with training(tmp_path, with_callback(trainer), *words, CLOUDRUN_SOCKET=str(supervisor.address)) as child:
        hello = supervisor.wait_for(Hello)
        assert (hello.rank, hello.world, hello.pid) == (0, 1, child.pid)
        first = supervisor.wait_for(Progress)
        assert (first.step > 0, first.total) == (True, 100000)
        supervisor.channel.tell("save", {"reason": "notice", "deadline": None})
        saved = supervisor.wait_for(Saved)
        assert is_whole(Path(saved.path), trainer), saved
        assert saved.step >= first.step
        assert supervisor.wait_for(Progress).step > saved.step, "it goes on training"
        supervisor.channel.tell("stop", {"deadline": 0.0})
        last = supervisor.wait_for(Saved)
        assert last.step > saved.step
        assert child.wait(60.0) == 0, (tmp_path / "output").read_text()[-3000:]
    told = [line for line in (tmp_path / "output").read_text().splitlines() if line.startswith("step ")]
    assert told[-1] == f"step {last.step}/100000", "the last step is the one that was saved"
    assert is_whole(Path(last.path), trainer)
    assert not supervisor.complaints


def is_whole(path: Path, trainer: Trainer) -> bool:
    loader = [PYTHON, str(ROOT / "tests" / "trainers" / "load.py"), trainer.name]
    env = os.environ | {"PYTHONPATH": str(ON_CPU)}
    done = subprocess.run(loader, input=str(path), capture_output=True, text=True, env=env, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("trainer", [TRANSFORMERS, LIGHTNING], ids=lambda one: one.name)
def test_without_a_supervisor_a_script_runs_as_ever(tmp_path: Path, trainer: Trainer) -> None:
    trainer.require()
    with training(tmp_path, with_callback(trainer), "--steps", "20") as child:
        assert child.wait(90.0) == 0, (tmp_path / "output").read_text()[-3000:]
    assert "step 20/20" in (tmp_path / "output").read_text()


EXACT = '''
"""A shuffled epoch of 16 batches, dropout, noise from the global generators: what Lightning alone does not resume."""
import sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from runner.training import SeededDataset
from runner.training.lightning import CloudrunCallback, EpochSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Points(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        point = torch.randn(2, generator=torch.Generator().manual_seed(index)) + 0.01 * torch.randn(2)
        return point, (point.prod() > 0).long()

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 2))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

workers, resume = int(sys.argv[1]), sys.argv[2] or None
pl.seed_everything(0)
data = SeededDataset(Points())
sampler = EpochSampler(data)
saves = ModelCheckpoint(sys.argv[3], "{step}", every_n_train_steps=4, save_top_k=-1)
trainer = pl.Trainer(
    max_steps=40, max_epochs=-1, callbacks=[saves, CloudrunCallback(sampler)], use_distributed_sampler=False,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers), ckpt_path=resume)
torch.save(trainer.model.state_dict(), sys.argv[3] + "/end.pt")
'''


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_goes_on_to_the_same_bits(tmp_path: Path, workers: int) -> None:
    """From within an epoch, and from its end."""
    LIGHTNING.require()
    ends = {}
    for resume in ("", "whole/step=28.ckpt", "whole/step=16.ckpt"):
        folder = resume.replace("/", "-") or "whole"
        with training(tmp_path, EXACT, str(workers), resume, folder) as child:
            assert child.wait(90.0) == 0, (tmp_path / "output").read_text()[-3000:]
        ends[resume] = (tmp_path / folder / "end.pt").read_bytes()
    assert {resume: end == ends[""] for resume, end in ends.items()} == dict.fromkeys(ends, True)
