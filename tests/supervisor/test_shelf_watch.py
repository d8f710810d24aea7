"""What is told of the checkpoint folder, and in what order."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from runner.core.events import CheckpointSaved, Event
from runner.supervisor.shelf_watch import ShelfWatch, is_unchanged
from tests.supervisor.sessions import make_session, save, wait_for


def test_no_checkpoint_is_told_after_the_last_look(tmp_path: Path) -> None:
    """A look that is still telling when the trainer ends would make a finished job of one that owes a checkpoint."""
    telling, go_on, happened = threading.Event(), threading.Event(), list[str]()

    def post(event: Event) -> None:
        telling.set()
        go_on.wait(10.0)
        happened.append(type(event).__name__)

    def end() -> None:
        ended.set()
        watch.last_look(1, clean_exit=True)
        happened.append("ended")

    session, _ = make_session(tmp_path)
    watch, ended = ShelfWatch(replace(session, post=post), tmp_path / "folder"), threading.Event()
    watch.follow(1, ended)
    save(tmp_path / "folder", 3)
    assert telling.wait(10.0)
    last = threading.Thread(target=end)
    last.start()
    last.join(0.3)
    go_on.set()
    last.join(10.0)
    assert happened == ["CheckpointSaved", "ended"]


def test_a_checkpoint_is_told_once_and_again_when_it_is_written_anew(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    folder, ended = tmp_path / "folder", threading.Event()
    watch = ShelfWatch(session, folder)
    watch.follow(4, ended)
    save(folder, 3)
    first = posted.wait(CheckpointSaved).checkpoint
    assert (first.step, first.attempt) == (3, 4)
    assert watch.find(first) is not None
    save(folder, 3)
    wait_for(lambda: len(posted.of(CheckpointSaved)) == 2)
    assert watch.find(first) is None, "its files are not those that were told"
    ended.set()
    watch.last_look(4, clean_exit=True)
    assert len(posted.of(CheckpointSaved)) == 2


def test_while_a_trainer_is_followed_nobody_looks_again_for_a_past_attempt(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    folder, ended = tmp_path / "folder", threading.Event()
    watch = ShelfWatch(session, folder)
    watch.follow(2, ended)
    save(folder, 3)
    watch.look_again(1)
    assert posted.wait(CheckpointSaved).attempt == 2
    ended.set()


def test_what_the_trainer_has_deleted_is_forgotten(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    watch = ShelfWatch(session, tmp_path / "folder")
    for step in range(5):
        path = save(tmp_path / "folder", step)
        watch.last_look(1, clean_exit=True)
        path.unlink()
    assert len(watch._found) == 1
    found = watch.find(posted.of(CheckpointSaved)[-1].checkpoint)
    assert found is not None
    assert not is_unchanged(found)
