"""What an attempt needs: setup, data in their places, and nothing in the way that misleads the trainer."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from runner.checkpoint.upload import Facts, upload
from runner.core.events import Noticed
from runner.core.state import Checkpoint
from runner.dataset.source import Source
from runner.errors import CorruptData, StoreUnreachable
from runner.storage.memory import Fault, MemoryStore
from runner.supervisor.preparation import (
    Preparation,
    SetupFailed,
    bring_checkpoint,
    clear_the_way,
    kept_aside,
    place_data,
)
from runner.supervisor.recovery import Ground, recover
from runner.supervisor.session import Session
from tests.checkpoint import trees
from tests.supervisor.sessions import make_session, save, save_here, wait_for

FACTS = Facts(created_at=1000.0, spec_digest="d", tool_version="1", host="a")


def rescue_nothing(run: int) -> None:
    """Nothing of the run lies elsewhere on this machine."""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_setup_runs_once_and_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path, "setup: echo once | tee -a ran")
    ground, _ = recover(session, rescue_nothing)
    before = open_files()
    for attempt in (1, 2):
        Preparation(session).prepare(ground, attempt)
    assert (tmp_path / "project/ran").read_text() == "once\n"
    assert session.local.log_segment(1, "a1-abcdef", 1).read_text() == "once\n"
    assert open_files() == before


def test_a_machine_that_waits_has_the_data_before_its_turn(tmp_path: Path) -> None:
    source = Source("memory://data", MemoryStore(objects={"file": b"x"}))
    session, _ = make_session(tmp_path, sources=(("train", source),))
    preparation = Preparation(session)
    preparation.warm_up()
    assert [path.read_bytes() for path in (tmp_path / "cache").rglob("file")] == [b"x"]
    ground, _ = recover(session, rescue_nothing)
    assert not preparation.data_dir(1).exists(), "the run is another machine's"
    preparation.prepare(ground, 1)
    assert (preparation.data_dir(1) / "train/file").read_bytes() == b"x"
    preparation.close()


def test_setup_that_fails_says_so_in_its_own_words(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path, "setup: 'echo no such wheel; exit 3'")
    ground, _ = recover(session, rescue_nothing)
    with pytest.raises(SetupFailed, match=r"exit code 3\): no such wheel"):
        Preparation(session).prepare(ground, 1)


@pytest.mark.parametrize("late", [False, True])
def test_setup_does_not_outlive_a_session_that_leaves(tmp_path: Path, *, late: bool) -> None:
    session, _ = make_session(tmp_path, "setup: 'echo begun >> ran; sleep 60'")
    ground, _ = recover(session, rescue_nothing)
    preparation = Preparation(session)
    failed: list[Exception] = []

    def prepare() -> None:
        try:
            preparation.prepare(ground, 1)
        except SetupFailed as error:
            failed.append(error)

    thread = threading.Thread(target=prepare)
    if late:
        thread.start()
        wait_for((tmp_path / "project/ran").exists)
    session.leaving.set()
    preparation.close()
    if not late:
        thread.start()
    thread.join(10.0)
    assert failed


def test_two_preparations_at_once_run_setup_once(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path, "setup: 'echo begun >> ran; sleep 0.5'")
    ground, _ = recover(session, rescue_nothing)
    preparation = Preparation(session)
    threads = [threading.Thread(target=preparation.prepare, args=(ground, attempt)) for attempt in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert (tmp_path / "project/ran").read_text() == "begun\n"


def test_the_data_folder_shows_what_the_spec_says_now(tmp_path: Path) -> None:
    one, two, data = tmp_path / "one", tmp_path / "two", tmp_path / "run/data"
    for folder in (one, two):
        folder.mkdir()
        (folder / "name").write_text(folder.name)

    def names() -> list[str]:
        return sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_symlink())

    place_data(data, [("train/images", one), ("test", two)])
    assert names() == ["test", "train/images"]
    assert (data / "train/images/name").read_text() == "one"
    place_data(data, [("train", two)])
    assert names() == ["train"]
    place_data(data, [("", one)])
    assert (data / "name").read_text() == "one"
    place_data(data, [("train", one), ("test", two)])
    assert names() == ["test", "train"]
    place_data(data, [])
    assert list(data.iterdir()) == []
    assert (one / "name").exists(), "the datasets themselves are never touched"
    assert (two / "name").exists()


def test_what_the_trainer_wrote_into_the_data_folder_stays(tmp_path: Path) -> None:
    data, one = tmp_path / "run/data", tmp_path / "one"
    one.mkdir()
    place_data(data, [("train", one)])
    (data / "index.bin").write_text("costly")
    place_data(data, [("other", one)])
    assert (data / "index.bin").read_text() == "costly"


def test_what_is_half_written_or_too_new_is_moved_aside(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    folder = session.local.checkpoints(1)
    for step in (5, 9):
        save_here(session, step)
    (folder / "step-7.pt").write_bytes((folder / "step-9.pt").read_bytes()[:-30])
    (folder / "tmp-checkpoint-8").mkdir()
    (folder / "metrics.csv").write_text("1,2\n")
    ground, told = recover(session, rescue_nothing)
    five = next(one for one in told.local if one.step == 5)
    assert bring_checkpoint(session, ground, five) == folder / "step-5.pt"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.csv", "step-5.pt"]
    assert len(posted.of(Noticed)) == 3


def test_in_the_owners_folder_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path, "checkpoints: {dir: .}")
    project = tmp_path / "project"
    (project / "tmp").mkdir()
    (project / "tmp/precious").write_text("data")
    (project / "download.part").write_text("half a file of the owner's")
    (project / ".step-9.pt.0a1b2c3d.cloudrun-part").write_text("half a restore of ours")
    save(project, 5)
    ground, _ = recover(session, rescue_nothing)
    clear_the_way(session, ground, None)
    left = {path.name for path in project.iterdir() if not path.name.startswith(".cloudrun")}
    assert left == {"job.yaml", "tmp", "download.part", "step-5.pt"}


def test_a_local_checkpoint_that_changed_is_not_used(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    path = save_here(session, 5)
    ground, told = recover(session, rescue_nothing)
    os.utime(path)
    with pytest.raises(CorruptData, match="changed"):
        bring_checkpoint(session, ground, told.local[0])


def test_while_the_store_is_away_the_same_files_here_will_do(tmp_path: Path) -> None:
    away: list[Fault] = []
    store = MemoryStore(lambda operation, _key, _nth: away[0] if away and operation == "read" else None)
    session, posted = make_session(tmp_path, store=store)
    path = save_here(session, 5)
    ground, told = recover(session, rescue_nothing)
    found = ground.watch.find(told.local[0])
    assert found is not None
    upload(store, session.keys, 1, "step-000000000005.a1-abcdef", found, facts=FACTS, stop=session.leaving)
    ground, told = recover(session, rescue_nothing)
    (stored,) = told.stored
    away.append(Fault(StoreUnreachable("no route")))
    assert bring_checkpoint(session, ground, stored) == path
    assert "no route" in posted.wait(Noticed).text
    time.sleep(0.01)
    os.utime(path)
    with pytest.raises(StoreUnreachable):
        bring_checkpoint(session, ground, stored)


def store_what_is_here(session: Session) -> tuple[Ground, Checkpoint]:
    """The one checkpoint of this disk goes into the store."""
    ground, told = recover(session, rescue_nothing)
    (one,) = told.local
    found = ground.watch.find(one)
    assert found is not None
    upload(session.store, session.keys, 1, f"step-{one.step:012d}.a1-abcdef", found, facts=FACTS, stop=session.leaving)
    ground, told = recover(session, rescue_nothing)
    (stored,) = told.stored
    return ground, stored


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_trainer_that_looks_for_its_newest_is_led_to_the_chosen_one(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    session.store.write(session.keys.job_yaml(1), b"")
    folder = session.local.checkpoints(1)
    write(folder / "global_step30", trees.zero(30))
    ground, stored = store_what_is_here(session)
    half = {name: data for name, data in trees.zero(40).items() if "rank_1" not in name}
    write(folder / "global_step40", half)
    (folder / "latest").write_text("global_step40")
    assert bring_checkpoint(session, ground, stored) == folder / "global_step30"
    assert (folder / "latest").read_text() == "global_step30"
    shutil.rmtree(folder)
    bring_checkpoint(session, ground, stored)
    assert sorted(os.listdir(folder)) == ["global_step30", "latest"], "also on another machine"


def test_a_note_of_a_newest_one_that_is_gone_is_set_aside(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    ground, _ = recover(session, rescue_nothing)
    folder = session.local.checkpoints(1)
    half = {name: data for name, data in trees.zero(40).items() if "rank_1" not in name}
    write(folder / "global_step40", half)
    (folder / "latest").write_text("global_step40")
    clear_the_way(session, ground, None)
    assert os.listdir(folder) == []
    assert os.listdir(session.folders(1).set_aside) == ["000001-global_step40"]
    assert os.listdir(kept_aside(session.folders(1).set_aside)) == ["000001-latest"]
    assert ["latest" in notice.text for notice in posted.of(Noticed)] == [False, True]


def test_checkpoints_in_several_folders_come_back_to_their_places(tmp_path: Path) -> None:
    globs = "checkpoints: {dir: ['runs/*/weights/*.pt', 'out/checkpoint-*']}"
    session, _ = make_session(tmp_path / "a", globs)
    session.store.write(session.keys.job_yaml(1), b"")
    project = tmp_path / "a/project"
    write(project / "out/checkpoint-20", trees.transformers(20).files)
    times = {path: path.stat().st_mtime_ns for path in (project / "out").rglob("*") if path.is_file()}
    ground, stored = store_what_is_here(session)
    assert stored.name == "out/checkpoint-20"
    write(project / "out/checkpoint-30", {"optimizer.pt": trees.torch_file()[:-9]})
    write(project / "out/logs", {"events": b"", "tmp.txt": b"mine"})
    assert bring_checkpoint(session, ground, stored) == project / "out/checkpoint-20"
    assert sorted(os.listdir(project / "out")) == ["checkpoint-20", "logs"]
    shutil.rmtree(project / "out")
    assert bring_checkpoint(session, ground, stored) == project / "out/checkpoint-20"
    assert {path: path.stat().st_mtime_ns for path in (project / "out").rglob("*") if path.is_file()} == times


def test_an_owners_model_is_not_overwritten_by_the_checkpoint_that_comes_back(tmp_path: Path) -> None:
    """Killed after the optimizer was taken out of ``last.pt``: what is resumed has the same name."""
    session, _ = make_session(tmp_path)
    session.store.write(session.keys.job_yaml(1), b"")
    folder = session.local.checkpoints(1)
    write(folder, {"last.pt": trees.ultralytics(6)})
    ground, stored = store_what_is_here(session)
    write(folder, {"last.pt": trees.ultralytics(-1), "best.pt": trees.ultralytics(-1)})
    clear_the_way(session, ground, None)
    assert sorted(os.listdir(folder)) == ["best.pt", "last.pt"], "nothing is to be resumed: both are left alone"
    assert bring_checkpoint(session, ground, stored).read_bytes() == trees.ultralytics(6)
    (aside,) = kept_aside(session.folders(1).set_aside).iterdir()
    assert aside.read_bytes() == trees.ultralytics(-1)
    assert (folder / "best.pt").read_bytes() == trees.ultralytics(-1)


def test_of_what_is_whole_nothing_is_ever_deleted(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    save_here(session, 1)
    ground, told = recover(session, rescue_nothing)
    for step in range(2, 9):
        half = save_here(session, 100 + step)
        half.write_bytes(half.read_bytes()[:-1])
        save_here(session, step)
        bring_checkpoint(session, ground, told.local[0])
    aside = session.folders(1).set_aside
    assert sorted(os.listdir(kept_aside(aside))) == [f"{step - 1:06d}-step-{step}.pt" for step in range(2, 9)]
    assert sorted(os.listdir(aside)) == [f"{step - 1:06d}-step-{100 + step}.pt" for step in range(6, 9)]
