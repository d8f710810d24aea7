"""From shared memory to the disk: which snapshots become checkpoints, whoever is missing or full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.formats import judge
from runner.core.events import CheckpointSaved, Noticed
from runner.supervisor.guard import command_line, processes
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import ShelfWatch
from runner.supervisor.slots import read_slot
from runner.supervisor.snapshots import KEPT_HERE, Announced, Answer, Passed, Snapshots, SnapshotWriter
from tests.shell.slot_files import WRITING, write_slot
from tests.supervisor.sessions import Posted, make_session, wait_for


class Bench:
    """One attempt's writer, its shared memory in a folder of the test's."""

    def __init__(self, root: Path, *lines: str) -> None:
        self.session: Session
        self.posted: Posted
        self.session, self.posted = make_session(root, *lines)
        self.target = self.session.folders(1).checkpoints
        self.target.mkdir(parents=True, exist_ok=True)
        self.memory = root / "memory"
        self.memory.mkdir(exist_ok=True)
        self.uploading: str | None = None
        self.answers: list[Answer] = []
        self.open()

    def open(self) -> None:
        """As a supervisor's start does."""
        self.snapshots = Snapshots(self.session, 1, lambda: self.uploading, self.memory)
        self.watch = ShelfWatch(self.session, self.target)

    def begin(self) -> None:
        self.writer = SnapshotWriter(self.snapshots, self.watch, self.answers.append, self.complain)
        self.writer.start()
        assert self.snapshots.welcome()["shared_memory"] == str(self.snapshots.folder)

    def complain(self, text: str) -> None:
        self.session.post(Noticed(text))

    def announce(self, step: int, *, rank: int = 0, number: int = 0, world: int = 1, sequence: int = 0) -> None:
        """Rank's slot is READY with this step, and it says so."""
        sequence = sequence or step
        write_slot(self.snapshots.folder, step, rank=rank, number=number, world=world, sequence=sequence)
        self.say(step, rank=rank, number=number, sequence=sequence)

    def say(self, step: int, *, rank: int = 0, number: int = 0, sequence: int = 0) -> None:
        slot, at = f"rank{rank}-{number}", time.time()
        self.writer.hear(Announced(rank, slot, sequence or step, step, at, 0.25))

    def answered(self, count: int) -> list[Answer]:
        wait_for(lambda: len(self.answers) >= count)
        return sorted(self.answers, key=lambda answer: (answer.sequence, answer.rank))

    def steps(self) -> list[int]:
        """What lies complete on the disk; nothing else may lie there."""
        for path in self.target.iterdir():
            if path.name != ".cloudrun-run":
                assert judge(path).complete, path
        return sorted(int(path.name.removeprefix("step-")) for path in self.target.glob("step-*"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_snapshot_becomes_a_checkpoint_that_is_told_once_with_what_it_cost(bench: Bench) -> None:
    bench.begin()
    bench.watch.follow(1, ended := threading.Event())
    bench.announce(12)
    saved = bench.posted.wait(CheckpointSaved)
    assert bench.answered(1) == [Answer(0, "rank0-0", 12)]
    assert (saved.attempt, saved.checkpoint.step, saved.stall, saved.step_known) == (1, 12, 0.25, True)
    assert saved.checkpoint.metrics == (("loss", 0.5),)
    assert 0 < saved.persist < 20
    assert bench.writer.finish() == ""
    ended.set()
    bench.watch.last_look(1, clean_exit=True)
    assert len(bench.posted.of(CheckpointSaved)) == 1
    state = json.loads((bench.target / "step-000000000012/state.json").read_text())
    size = (bench.target / "step-000000000012/state.safetensors").stat().st_size
    assert state == {
        "format": "cloudrun-training",
        "version": 1,
        "step": 12,
        "metrics": {"loss": 0.5},
        "rank": 0,
        "files": {"state.safetensors": size},
    }


def test_several_ranks_make_one_checkpoint(bench: Bench) -> None:
    bench.begin()
    for rank in (2, 0, 1):
        bench.announce(12, rank=rank, world=3)
    assert [answer.refused for answer in bench.answered(3)] == ["", "", ""]
    folder = bench.target / "step-000000000012"
    names = [f"rank-0000{rank}.{kind}" for rank in (1, 2) for kind in ("json", "safetensors")]
    assert sorted(os.listdir(folder)) == [*names, "state.json", "state.safetensors"]
    files = json.loads((folder / "state.json").read_text())["files"]
    assert files == {name: (folder / name).stat().st_size for name in os.listdir(folder) if name != "state.json"}
    assert json.loads((folder / "rank-00002.json").read_text())["rank"] == 2


def test_a_step_that_a_rank_has_left_out_is_given_back(bench: Bench) -> None:
    bench.begin()
    bench.announce(12, rank=0, world=2)
    bench.writer.hear(Passed(1, 12))
    time.sleep(0.2)
    assert bench.answers == [], "rank 1 may be about to announce it"
    bench.writer.hear(Passed(1, 13))
    assert bench.answered(1) == [Answer(0, "rank0-0", 12, "not all ranks saved this step")]
    bench.announce(16, rank=0, world=2)
    bench.announce(16, rank=1, world=2)
    assert [answer.refused for answer in bench.answered(3)[1:]] == ["", ""]
    assert bench.writer.finish() == ""
    assert bench.steps() == [16]


def test_when_two_wait_the_newest_is_saved_and_the_other_given_back(bench: Bench) -> None:
    bench.begin()
    write_slot(bench.snapshots.folder, 12, number=0, sequence=12)
    write_slot(bench.snapshots.folder, 16, number=1, sequence=16)
    listen = bench.writer._listen
    bench.writer._heard.put(None)
    bench.writer._thread.join()
    bench.say(12, number=0)
    bench.say(16, number=1)
    assert listen()
    assert [slot.step for slot in bench.writer._waiting] == [12, 16]
    bench.writer._write([slot for slot in bench.writer._waiting if slot.step == 16])
    assert bench.answered(2) == [
        Answer(0, "rank0-0", 12, "a newer one was saved"),
        Answer(0, "rank0-1", 16),
    ]
    assert bench.steps() == [16]


def test_what_a_slot_does_not_hold_is_not_believed(bench: Bench) -> None:
    bench.begin()
    bench.say(12)
    write_slot(bench.snapshots.folder, 12, sequence=3, number=1)
    bench.say(12, number=1, sequence=4)
    refusals = [answer.refused for answer in bench.answered(2)]
    assert refusals == ["the slot does not hold what was announced"] * 2
    write_slot(bench.snapshots.folder, 12, sequence=5, meta=b"[" * 100_000)
    bench.say(12, sequence=5)
    assert "cannot be read" in bench.answered(3)[-1].refused or "cannot be read" in str(bench.answers)
    bench.announce(16)
    assert bench.answered(4)[-1] == Answer(0, "rank0-0", 16)


def test_what_was_ready_at_the_end_is_saved_though_nobody_announced_it(bench: Bench) -> None:
    """The trainer was killed between the last byte and its line."""
    bench.begin()
    write_slot(bench.snapshots.folder, 12, number=0)
    write_slot(bench.snapshots.folder, 16, number=1, state=WRITING)
    assert bench.writer.finish() == ""
    assert bench.steps() == [12]
    bench.snapshots.close()
    assert os.listdir(bench.memory) == []


def test_the_next_supervisor_saves_what_a_killed_one_could_not(bench: Bench) -> None:
    bench.begin()
    write_slot(bench.snapshots.folder, 12)
    bench.snapshots._folder.close(remove=False)  # as the end of the process does
    (bench.target / ".snapshot-of-its-saver").mkdir()
    bench.open()
    bench.snapshots.rescue()
    assert bench.steps() == [12]
    assert [found.step for found in bench.watch.first_look(clean_exit=False)] == [12]
    bench.snapshots.close()
    assert os.listdir(bench.memory) == []


def test_a_job_without_snapshots_makes_no_folder(bench: Bench) -> None:
    bench.snapshots.rescue()
    bench.writer = SnapshotWriter(bench.snapshots, bench.watch, bench.answers.append, bench.complain)
    bench.writer.start()
    assert bench.writer.finish() == ""
    bench.snapshots.close()
    assert os.listdir(bench.memory) == []


def test_another_run_or_another_disk_has_its_own_memory(bench: Bench, tmp_path: Path) -> None:
    one = Snapshots(bench.session, 1, lambda: None, bench.memory)
    other_run = Snapshots(bench.session, 2, lambda: None, bench.memory)
    elsewhere, _ = make_session(tmp_path / "elsewhere")
    assert len({one.folder, other_run.folder, Snapshots(elsewhere, 1, lambda: None, bench.memory).folder}) == 3


def test_a_trainer_hears_why_there_is_no_shared_memory(bench: Bench) -> None:
    bench.snapshots.folder.mkdir(mode=0o755)
    assert bench.snapshots.welcome() == {
        "shared_memory": None,
        "room": 0,
        "why_not": f"{bench.snapshots.folder} belongs to somebody else",
    }


def test_only_the_newest_few_stay_on_this_disk_and_what_is_being_uploaded(bench: Bench) -> None:
    bench.begin()
    bench.uploading = "step-000000000001"
    (bench.target / "step-000000000000").mkdir()  # not ours: no state.json
    (bench.target / "step-000000000000" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    steps = range(1, KEPT_HERE + 4)
    for count, step in enumerate(steps, 1):
        bench.announce(step)
        bench.answered(count)
    assert bench.steps() == [0, 1, *steps[-KEPT_HERE:]]


def test_in_a_folder_of_the_owners_nothing_is_deleted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, f"checkpoints: {{dir: {tmp_path / 'own'}}}")
    assert bench.target == tmp_path / "own"
    bench.begin()
    for step in range(1, KEPT_HERE + 3):
        bench.announce(step)
        bench.answered(step)
    assert bench.steps() == list(range(1, KEPT_HERE + 3))


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_disk_that_takes_nothing_is_told_once_and_the_end_is_no_good_one(
    tmp_path: Path, mount: Callable[[str], Path], fault: str
) -> None:
    disk = mount("size=1m")
    bench = Bench(tmp_path, f"checkpoints: {{dir: {disk}}}")
    bench.begin()
    filler = disk / "filler"
    if fault == "full":
        filler.write_bytes(b"\0" * 1_040_000)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for count, step in enumerate((12, 16), 1):
        bench.announce(step)
        assert bench.answered(count)[-1].refused
    words = {"full": "the disk is full", "read-only": "Read-only file system"}[fault]
    assert words in bench.answers[0].refused
    (told,) = bench.posted.of(Noticed)
    assert told.text.startswith(f"step 12 could not be saved in {disk}: ")
    assert words in bench.writer.finish()
    slot = read_slot(bench.snapshots.folder / "rank0-0")
    assert slot is not None
    assert slot.step == 16, "the newest one waits for better times"
    if fault == "read-only":
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    filler.unlink(missing_ok=True)
    bench.snapshots.begin()
    assert (disk / "step-000000000016" / "state.json").exists()
    bench.snapshots.close()
    assert os.listdir(bench.memory) == []


def stopped_saver_below(parent: int) -> int:
    """The saver that a process has started, as early in its life as it can be stopped."""
    found: list[int] = []

    def look() -> bool:
        for pid, process in processes().items():
            if process.parent == parent and any(word.endswith("saver.py") for word in command_line(pid)):
                os.kill(pid, signal.SIGSTOP)
                found.append(pid)
        return bool(found)

    wait_for(look)
    return found[0]


def test_a_saver_that_is_killed_loses_nothing(bench: Bench) -> None:
    bench.begin()
    write_slot(bench.snapshots.folder, 12, size=200 << 20)
    bench.say(12, sequence=1)
    os.kill(stopped_saver_below(os.getpid()), signal.SIGKILL)
    (answer,) = bench.answered(1)
    assert "ended with -9" in answer.refused
    assert bench.writer.finish() == ""
    assert os.listdir(bench.target) == ["step-000000000012"]


SUPERVISOR = """
import sys
from pathlib import Path
from runner.supervisor.slots import newest_whole
from runner.supervisor.snapshots import Snapshots
from tests.supervisor.sessions import make_session
session, _ = make_session(Path(sys.argv[1]))
snapshots = Snapshots(session, 1, lambda: None, Path(sys.argv[1]) / "memory")
snapshots.welcome()
snapshots.persist(newest_whole(snapshots._folder.slots()), hurried=True)
"""


def test_a_saver_that_outlives_its_supervisor_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    bench.begin()
    write_slot(bench.snapshots.folder, 12, size=200 << 20)
    bench.snapshots._folder.close(remove=False)
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], env=environ)
    saver = stopped_saver_below(supervisor.pid)
    supervisor.kill()
    supervisor.wait()
    bench.open()
    with pytest.raises(TimeoutError):
        bench.snapshots._folder.open(within=0.0)
    threading.Timer(0.3, lambda: os.kill(saver, signal.SIGCONT)).start()
    bench.snapshots.rescue()
    assert os.listdir(bench.target) == ["step-000000000012"]
    assert bench.posted.of(Noticed) == []
    bench.snapshots.close()
    assert os.listdir(bench.memory) == []


def test_what_could_not_be_saved_stays_for_the_next_supervisor(bench: Bench) -> None:
    bench.begin()
    write_slot(bench.snapshots.folder, 12)
    bench.snapshots.close()
    assert (bench.snapshots.folder / "rank0-0").exists()
    bench.open()
    bench.snapshots.rescue()
    assert bench.steps() == [12]
