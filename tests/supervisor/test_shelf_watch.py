"""What is told of the checkpoint folder, and in what order."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from runner.checkpoint.local import is_unchanged
from runner.checkpoint.manifest import signature
from runner.checkpoint.places import Places
from runner.checkpoint.upload import Facts, upload
from runner.core.events import CheckpointSaved, Event
from runner.supervisor.shelf_watch import Begun, ShelfWatch, copies_of, places_of
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
    assert watch.on_shelf(first) is not None
    save(folder, 3)
    wait_for(lambda: len(posted.of(CheckpointSaved)) == 2)
    assert watch.on_shelf(first) is None, "its files are not those that were told"
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


def test_a_name_that_is_written_again_and_again_is_uploaded_from_a_private_copy(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    watch, ended = ShelfWatch(session, folder, copies), threading.Event()
    watch.follow(1, ended)
    path = save(folder, 1, name="last.pt")
    first = posted.wait(CheckpointSaved).checkpoint
    here = watch.on_shelf(first)
    assert here is not None
    assert here.path == path
    copy = watch.find(first)
    assert copy is not None
    assert copy.path.is_relative_to(copies)
    path.write_bytes(b"PK the next save has begun")
    assert is_unchanged(copy)
    assert not is_unchanged(here)
    facts = Facts(1.7e9, "", "", "")
    manifest = upload(
        session.store, session.keys, 1, "step-000000000001.a1-abcdef", copy, facts=facts, stop=session.leaving
    )
    assert (manifest.name, manifest.kind, signature(manifest.files)) == ("last.pt", "file", first.signature)
    watch.stored(first)
    assert [file for file in copies.rglob("*") if file.is_file()] == []
    assert watch.find(first) is watch.on_shelf(first)
    ended.set()


def test_the_places_that_a_spec_names(tmp_path: Path) -> None:
    ours, _ = make_session(tmp_path / "a")
    one, _ = make_session(tmp_path / "b", "checkpoints: {dir: out}")
    many, _ = make_session(tmp_path / "c", "checkpoints: {dir: ['out/checkpoint-*', 'last/*.pt']}")
    assert places_of(ours, 3) == Places(ours.local.checkpoints(3))
    assert copies_of(ours, 3) == ours.local.run_cache(3) / "copies"
    assert places_of(one, 3) == Places(tmp_path / "b/project/out")
    assert copies_of(one, 3) == tmp_path / "b/project/out/.cloudrun-copies"
    assert places_of(many, 3) == Places(tmp_path / "c/project", ("out/checkpoint-*", "last/*.pt"))


def test_what_is_known_of_a_save_is_told_with_it_in_whichever_folder_it_lies(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    watch = ShelfWatch(session, Places(tmp_path, ("out/*.pt",)))
    watch.expect("step-7.pt", Begun(session.clock.now(), 0.25, (("loss", 1.5),)))
    save(tmp_path / "out", 7, name="step-7.pt")
    watch.last_look(1, clean_exit=True)
    told = posted.wait(CheckpointSaved)
    assert (told.checkpoint.name, told.stall, told.checkpoint.metrics) == ("out/step-7.pt", 0.25, (("loss", 1.5),))


def test_a_checkpoint_is_told_before_its_private_copy_is_made(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    seen = []

    def look(event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            seen.append(list((tmp_path / "copies").rglob("last.pt")))

    watch = ShelfWatch(replace(session, post=look), tmp_path / "folder", tmp_path / "copies")
    save(tmp_path / "folder", 1, name="last.pt")
    watch.last_look(1, clean_exit=True)
    assert seen == [[]]
    assert len(list((tmp_path / "copies").rglob("last.pt"))) == 1
