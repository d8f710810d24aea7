"""Saves into shared memory: what is copied, when a save is skipped, and where it goes when there is no room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.core.events import Noticed
from runner.supervisor import slots as theirs
from runner.supervisor.channel import Channel as Server
from runner.supervisor.channel import Message, Remark, Snapshot
from runner.supervisor.conversation import Conversation
from runner.supervisor.shelf_watch import ShelfWatch
from runner.supervisor.slots import read_slot
from runner.supervisor.snapshots import Snapshots
from runner.training import shared as ours
from runner.training.channel import Channel
from runner.training.direct import Direct
from runner.training.image import Image, image_of, load_image
from runner.training.ranks import Ranks
from runner.training.shared import SharedMemory
from tests.supervisor.sessions import make_session, wait_for

META = json.dumps({"format": "cloudrun-training", "version": 1, "metrics": {"loss": 0.5}}).encode()
MIB = 1 << 20
ALONE = Ranks(0, 1)


def test_both_sides_mean_the_same_bytes() -> None:
    names = ("MAGIC", "EMPTY", "WRITING", "READY", "PAGE", "STATE_AT")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert ours.HEADER.format == theirs.HEADER.format


def a_state(step: int, numbers: int = 100_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": torch.randn(numbers, generator=generator),
        "turned": torch.randn(30, 20, generator=generator).t(),
        "step": torch.tensor(step),
        "none": torch.empty(0),
    }


def an_image(step: int, numbers: int = 100_000) -> Image:
    return image_of(a_state(step, numbers))


class Silent:
    """A supervisor that has shared memory, and answers only when it is told to."""

    def __init__(self, root: Path, room: int, memory: Path | None = None) -> None:
        self.memory = memory or root / "memory"
        self.memory.mkdir(exist_ok=True)
        self.heard: list[Message] = []
        welcome = {"shared_memory": str(self.memory), "room": room, "why_not": None}
        self.server = Server(lambda rank, message: self.heard.append(message), lambda: welcome, lambda text: None)
        self.path = str(self.server.open(root / "socket"))
        self.checkpoints = root / "checkpoints"

    def join(self, ranks: Ranks = ALONE) -> SharedMemory:
        channel = Channel.connect(ranks.rank, ranks.world, self.path)
        assert channel is not None
        return SharedMemory(channel, Direct(self.checkpoints, ranks, 3, channel), ranks)

    def answer(self, snapshot: Snapshot) -> None:
        self.server.tell("persisted", {"slot": snapshot.slot, "sequence": snapshot.sequence})

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def wait(self, kind: type[Any], count: int) -> list[Any]:
        wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    one = Silent(tmp_path, 100 * MIB)
    yield one
    one.server.close()


def test_two_slots_take_turns_and_a_third_save_is_skipped(silent: Silent) -> None:
    memory = silent.join()
    memory.prepare(an_image(1).size)
    assert memory.save(an_image(1), META, 1, False)
    assert memory.save(an_image(2), META, 2, False)
    first, second = silent.wait(Snapshot, 2)
    assert {first.slot, second.slot} == {"rank0-0", "rank0-1"}
    assert (first.step, first.reason, second.step) == (1, "cadence", 2)
    assert 0 < first.stall < 20
    before = (silent.memory / first.slot).read_bytes()
    assert not memory.save(an_image(3), META, 3, False)
    assert not memory.save(an_image(4), META, 4, False)
    assert len(silent.wait(Remark, 1)) == 1, "it is said, but not again and again"
    assert (silent.memory / first.slot).read_bytes() == before, "what is being read is not written"
    silent.answer(first)
    wait_for(lambda: memory.save(an_image(5), META, 5, False))
    assert silent.wait(Snapshot, 3)[2].slot == first.slot


def test_a_slot_holds_what_a_safetensors_file_would(silent: Silent, tmp_path: Path) -> None:
    memory = silent.join()
    assert memory.save(an_image(1), META, 1, True)
    (told,) = silent.wait(Snapshot, 1)
    assert told.reason == "asked"
    slot = read_slot(silent.memory / told.slot)
    assert slot is not None
    assert (slot.sequence, slot.step, slot.rank, slot.world) == (told.sequence, 1, 0, 1)
    assert slot.read_meta() == META
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(slot.path.read_bytes()[slot.image_at :][: slot.image])
    loaded = load_image(copy)
    assert loaded.keys() == a_state(1).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in a_state(1).items())


def test_a_save_that_was_asked_for_waits_for_a_slot(silent: Silent) -> None:
    memory = silent.join()
    assert memory.save(an_image(1), META, 1, False)
    assert memory.save(an_image(2), META, 2, False)
    (first, _) = silent.wait(Snapshot, 2)
    threading.Timer(0.5, lambda: silent.answer(first)).start()
    began = time.monotonic()
    assert memory.save(an_image(3), META, 3, True)
    assert time.monotonic() - began > 0.4
    assert silent.wait(Snapshot, 3)[2].step == 3


def test_one_that_waits_in_vain_is_written_directly(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "WAIT_S", 0.3)
    memory = silent.join()
    assert memory.save(an_image(1), META, 1, False)
    assert memory.save(an_image(2), META, 2, False)
    assert memory.save(an_image(3), META, 3, True)
    assert os.listdir(silent.checkpoints) == ["step-000000000003"]
    assert "has not saved a snapshot within" in silent.wait(Remark, 1)[0].text


def test_when_the_supervisor_has_gone_saves_are_written_directly(silent: Silent) -> None:
    memory = silent.join()
    assert memory.save(an_image(1), META, 1, False)
    silent.server.close()
    wait_for(lambda: not memory._channel.alive)
    assert memory.save(an_image(2), META, 2, False)
    assert os.listdir(silent.checkpoints) == ["step-000000000002"]


def test_where_only_one_fits_there_is_one(tmp_path: Path) -> None:
    silent = Silent(tmp_path, 2 * MIB)
    memory = silent.join()
    memory.prepare(an_image(1).size)
    assert memory.save(an_image(1), META, 1, False)
    assert not memory.save(an_image(2), META, 2, False)
    assert [path.name for path in silent.memory.glob("rank*")] == ["rank0-0"]
    silent.server.close()


def test_what_does_not_fit_is_written_directly_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = Silent(tmp_path, MIB)
    memory = silent.join()
    memory.prepare(an_image(1).size)
    for step in (1, 2):
        assert memory.save(an_image(step), META, step, False)
    assert sorted(os.listdir(silent.checkpoints)) == ["step-000000000001", "step-000000000002"]
    (remark,) = silent.wait(Remark, 1)
    assert "MiB are needed, 1 MiB are left of what may be taken" in remark.text
    assert capsys.readouterr().err.count("no room in shared memory") == 1
    assert silent.of(Snapshot) == []
    assert list(silent.memory.glob("rank*")) == []
    silent.server.close()


def test_shared_memory_that_is_full_after_all_ends_no_training(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    """Somebody else took it after the supervisor had looked: a plain write there would end the process (SIGBUS)."""
    silent = Silent(tmp_path, 100 * MIB, mount("size=5m"))
    memory = silent.join()
    image = an_image(1, 2 * MIB)
    assert memory.save(image, META, 1, False)
    assert os.listdir(silent.checkpoints) == ["step-000000000001"]
    assert "shared memory is full" in silent.wait(Remark, 1)[0].text
    assert list(silent.memory.glob("rank*")) == []
    silent.server.close()


def test_a_state_that_grows_gets_larger_slots(silent: Silent) -> None:
    memory = silent.join()
    assert memory.save(an_image(1), META, 1, True)
    (first,) = silent.wait(Snapshot, 1)
    threading.Timer(0.3, lambda: silent.answer(first)).start()
    assert memory.save(an_image(2, 2_000_000), META, 2, True)
    told = silent.wait(Snapshot, 2)[1]
    slot = read_slot(silent.memory / told.slot)
    assert slot is not None
    assert slot.image == an_image(2, 2_000_000).size
    assert len(list(silent.memory.glob("rank*"))) == 2


def test_slots_are_all_there_before_the_first_save(silent: Silent) -> None:
    memory = silent.join()
    memory.prepare(an_image(1).size)
    wait_for(lambda: all(slot.is_ready for slot in memory._slots))
    for path in silent.memory.glob("rank*"):
        assert path.stat().st_blocks * 512 >= an_image(1).size, "no page of it is left to be found later"
    assert len(memory._slots) == 2
    kept = [slot._path.stat().st_ino for slot in memory._slots]
    memory.prepare(an_image(1).size)
    memory.prepare(10)
    assert [slot._path.stat().st_ino for slot in memory._slots] == kept


@dataclass(frozen=True, slots=True)
class Meeting(Ranks):
    """Ranks that are threads."""

    said: Any = None
    barrier: Any = None

    def highest(self, *numbers: int) -> list[int]:
        self.said[self.rank] = numbers
        self.barrier.wait(20)
        result = [max(column) for column in zip(*self.said.values(), strict=True)]
        self.barrier.wait(20)
        return result


def together(memories: list[SharedMemory], step: int) -> list[bool]:
    done: dict[int, bool] = {}

    def work(rank: int) -> None:
        done[rank] = memories[rank].save(an_image(step), META, step, False)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(memories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [done[rank] for rank in range(len(memories))]


def test_the_ranks_do_the_same(silent: Silent) -> None:
    """A step that only some have saved is worth nothing."""
    said: dict[int, tuple[int, ...]] = {}
    barrier = threading.Barrier(2)
    memories = [silent.join(Meeting(rank, 2, None, said, barrier)) for rank in range(2)]
    assert together(memories, 1) == [True, True]
    assert together(memories, 2) == [True, True]
    (other,) = [snapshot for snapshot in silent.wait(Snapshot, 4) if snapshot.slot == "rank1-0"]
    silent.server.tell("persisted", {"slot": other.slot, "sequence": other.sequence}, rank=1)
    wait_for(lambda: not memories[1]._slots[0].busy)
    assert together(memories, 3) == [False, False], "rank 0 has no slot"
    memories[1]._channel.close()
    assert together(memories, 4) == [True, True]
    assert sorted(os.listdir(silent.checkpoints)) == ["step-000000000004"]
    assert (silent.checkpoints / "step-000000000004" / "rank-00001.safetensors").exists()


# -- a whole attempt, and kills ----------------------------------------------------------------------------------------

TRAINER = """
import os, signal, sys, time
from pathlib import Path
import torch
from runner.training import shared
from runner.training.channel import Channel
from runner.training.direct import Direct
from runner.training.image import image_of
from runner.training.ranks import Ranks
from runner.training.shared import SharedMemory

META = b'{"format": "cloudrun-training", "version": 1, "metrics": {}}'
how, last = sys.argv[1], int(sys.argv[2])
channel = Channel.connect(0, 1)
memory = SharedMemory(channel, Direct(Path("direct"), Ranks(0, 1), 3, channel), Ranks(0, 1))

def image(step):
    return image_of({"step": torch.full((500_000,), step)})

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Torn:
    size = image(0).size
    def copy_into(self, buffer):
        buffer[:100_000] = 7
        die()

for step in range(1, last + 1):
    if step == last and how == "writing":
        memory.save(Torn(), META, step, True)
    if step == last and how == "unsaid":
        channel.snapshot = die
    memory.save(image(step), META, step, True)
if how == "said":
    die()
"""


@pytest.mark.parametrize(("how", "survives"), [("said", 3), ("unsaid", 3), ("writing", 2), ("ended", 3)])
def test_a_trainer_that_is_killed_loses_no_step_that_was_ready(tmp_path: Path, how: str, survives: int) -> None:
    session, posted = make_session(tmp_path)
    target = session.folders(1).checkpoints
    target.mkdir(parents=True)
    memory = tmp_path / "memory"
    memory.mkdir()
    snapshots = Snapshots(session, 1, lambda: None, memory)
    talk = Conversation(session, 1, ShelfWatch(session, target), snapshots, lambda progress: None)
    environ = {**os.environ, "CLOUDRUN_SOCKET": talk.open(tmp_path / "socket")}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, how, "3"], env={**environ, "PYTHONPATH": str(root)}, check=False, cwd=tmp_path
    )
    assert done.returncode == (0 if how == "ended" else -signal.SIGKILL)
    assert talk.finish() == ""
    newest = max(target.iterdir())
    assert newest.name == f"step-{survives:012d}"
    assert torch.equal(load_image(newest / "state.safetensors")["step"], torch.full((500_000,), survives))
    assert json.loads((newest / "state.json").read_text())["files"] == {
        "state.safetensors": (newest / "state.safetensors").stat().st_size
    }
    assert posted.of(Noticed) == []
    snapshots.close()
    assert os.listdir(memory) == []
