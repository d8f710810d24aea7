"""Start is recover: which run, which checkpoints, and never a silent fresh start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from runner.checkpoint.upload import Facts, upload
from runner.core.events import Recovered
from runner.core.state import age
from runner.errors import StoreError
from runner.supervisor.recovery import check_store, note_trained, recover
from runner.supervisor.session import Session
from tests.supervisor.sessions import make_session, save, save_here

FACTS = Facts(created_at=1000.0, spec_digest="d", tool_version="1", host="a", environment={"OMP_NUM_THREADS": "7"})


def rescue_nothing(run: int) -> None:
    """Nothing of the run lies elsewhere on this machine."""


def recovered(session: Session) -> Recovered:
    return recover(session, rescue_nothing)[1]


def store_all(session: Session) -> list[str]:
    """What lies in the checkpoint folder, committed; the ids."""
    ground, told = recover(session, rescue_nothing)
    ids = []
    for one in told.local:
        found = ground.watch.find(one)
        assert found is not None
        ids.append(f"step-{one.step:012d}.a1-abcdef")
        upload(session.store, session.keys, ground.run, ids[-1], found, facts=FACTS, stop=session.leaving)
    return ids


def test_a_job_that_nobody_has_started_begins_run_1(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    assert recovered(session) == Recovered(run=1, attempt=0)
    assert session.store.read("job/run-1/job.yaml") == session.spec.raw_text.encode()


def test_what_is_stored_and_what_is_only_here(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    folder = session.local.checkpoints(1)
    save_here(session, 5)
    store_all(session)
    save(folder, 9)
    ground, told = recover(session, rescue_nothing)
    assert [one.step for one in told.stored] == [5]
    assert [(one.step, one.id) for one in told.local] == [(9, "local:step-9.pt")]
    assert told.attempt == 1, "the number of the stored checkpoint's attempt"
    assert ground.threads == "7", "as in the checkpoint, whatever this machine has"


def upload_of(session: Session, step: int, epoch: int) -> str:
    """The local checkpoint of a step, committed as another machine's, of that epoch; its id."""
    ground, told = recover(session, rescue_nothing)
    found = ground.watch.find(next(one for one in told.local if one.step == step))
    assert found is not None
    id_ = f"step-{step:012d}.a1-ffffff"
    facts = replace(FACTS, epoch=epoch)
    upload(session.store, session.keys, 1, id_, found, facts=facts, stop=session.leaving)
    found.path.unlink()
    return id_


def epochs(told: Recovered) -> dict[int, int]:
    return {one.step: one.epoch for one in told.local}


def held(session: Session) -> Session:
    session.lease.take()
    return session


def test_what_lies_here_is_of_the_epoch_in_which_this_machine_last_had_the_lease(tmp_path: Path) -> None:
    first, _ = make_session(tmp_path)
    save_here(held(first), 5)
    assert recovered(first).epoch == 1
    save_here(first, 8)
    first.lease.close(5.0)
    second, _ = make_session(tmp_path, id="bbbbbb")
    told = recovered(held(second))
    assert told.epoch == 2
    assert epochs(told)[8] == 1
    save_here(second, 11)
    second.lease.close(5.0)
    third, _ = make_session(tmp_path, id="cccccc")
    told = recovered(held(third))
    assert told.epoch == 3
    assert {step: epochs(told)[step] for step in (8, 11)} == {8: 1, 11: 2}, "each as of its own time"
    third.lease.close(5.0)


def test_a_stale_machines_leftovers_do_not_beat_what_another_one_has_stored_since(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    recovered(held(session))
    save_here(session, 60)
    session.lease.close(5.0)
    elsewhere, _ = make_session(tmp_path, id="bbbbbb")
    save_here(elsewhere, 45)
    stored = upload_of(elsewhere, 45, epoch=2)
    back, _ = make_session(tmp_path, id="cccccc")
    told = recovered(held(back))
    assert epochs(told) == {60: 1}
    assert max((*told.stored, *told.local), key=age).id == stored
    assert told.epoch == 3, "above all that is stored, whatever the lease says"
    back.lease.close(5.0)


def test_what_is_behind_the_checkpoint_it_was_given_is_not_of_the_new_epoch(tmp_path: Path) -> None:
    """A trainer that started over saved step 5, and the supervisor was killed before the next start."""
    session, _ = make_session(tmp_path)
    save_here(session, 50)
    upload_of(session, 50, epoch=1)
    recovered(held(session))
    save_here(session, 5)
    save_here(session, 55)
    session.lease.close(5.0)
    again, _ = make_session(tmp_path, id="bbbbbb")
    assert epochs(recovered(held(again))) == {5: 1, 55: 2}
    again.lease.close(5.0)


def test_a_checkpoint_that_was_put_here_by_hand_counts_by_its_step(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    save_here(session, 50)
    upload_of(session, 50, epoch=4)
    session.local.lease_note.unlink()
    save_here(session, 60)
    assert epochs(recovered(session)) == {60: 4}


def test_training_that_ended_here_counts_no_more_once_another_machine_has_gone_on(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    recovered(held(session))
    save_here(session, 60)
    signature = recovered(session).local[0].signature
    note_trained(session, 1, signature)
    assert recovered(session).trained
    session.lease.close(5.0)
    elsewhere, _ = make_session(tmp_path, id="bbbbbb")
    save_here(elsewhere, 45)
    upload_of(elsewhere, 45, epoch=2)
    assert not recovered(session).trained


def test_the_store_is_looked_at_before_a_lease_is_written_into_it(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    check_store(session)
    save_here(session, 5)
    check_store(session)
    session.store.delete([session.keys.job_yaml(1)])
    with pytest.raises(StoreError, match="run 1 of job job"):
        check_store(session)
    fresh, _ = make_session(tmp_path, fresh=True)
    check_store(fresh)


def test_a_damaged_checkpoint_is_told_with_its_reason(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    save_here(session, 5)
    (id_,) = store_all(session)
    next((tmp_path / "store/job/run-1/checkpoints" / id_).glob("*.pt")).unlink()
    told = recovered(session)
    assert [one.id for one in told.rejected] == [id_]
    assert "missing" in told.rejected[0].reason
    assert [one.step for one in told.local] == [5], "the copy here is as good as ever"


def test_a_store_that_is_not_mounted_starts_nothing_from_the_beginning(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    save_here(session, 5)
    store_all(session)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    session, _ = make_session(tmp_path)
    with pytest.raises(StoreError, match="run 1 of job job") as caught:
        recover(session, rescue_nothing)
    assert "mounted" in caught.value.hint
    assert not (tmp_path / "store").exists(), "nothing is written where the store should be"


def test_a_fresh_run_after_the_store_was_emptied_takes_nothing_over(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    save_here(session, 5)
    note_trained(session, 1, None)
    store_all(session)
    shutil.rmtree(tmp_path / "store")
    fresh, _ = make_session(tmp_path, fresh=True)
    assert recovered(fresh) == Recovered(run=2, attempt=0)


def test_the_note_that_training_has_ended_holds_while_its_checkpoint_is_known(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    path = save_here(session, 5)
    signature = recovered(session).local[0].signature
    note_trained(session, 1, signature)
    assert recovered(session).trained
    path.unlink()
    assert not recovered(session).trained
    note_trained(session, 2, signature)
    save_here(session, 5)
    assert not recovered(session).trained, "it is of another run"


@pytest.mark.parametrize("note", ["", "[]", '{"run": "1"}', '{"run": 7, "signature": null}'])
def test_half_a_note_is_no_note(tmp_path: Path, note: str) -> None:
    session, _ = make_session(tmp_path)
    session.local.trained.parent.mkdir(parents=True)
    session.local.trained.write_text(note)
    assert not recovered(session).trained


def test_attempts_that_were_never_stored_are_counted(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    recover(session, rescue_nothing)
    path = session.local.log_segment(1, "a4-abcdef", 1)
    path.parent.mkdir(parents=True)
    path.touch()
    assert recovered(session).attempt == 4


def test_a_checkpoint_without_a_step_comes_after_the_newest_that_is_stored(tmp_path: Path) -> None:
    session, _ = make_session(tmp_path)
    save_here(session, 5)
    store_all(session)
    shutil.rmtree(session.local.checkpoints(1))
    save_here(session, 0, name="last.pt")
    assert [one.step for one in recovered(session).local] == [6]


OWN = "checkpoints: {dir: out}"


def test_the_owners_folder_of_an_older_run_is_not_resumed_from(tmp_path: Path) -> None:
    """Another machine has begun run 2 since."""
    session, _ = make_session(tmp_path, OWN)
    out = tmp_path / "project/out"
    save(out, 500)
    (out / "notes.txt").write_text("mine")
    assert [one.step for one in recovered(session).local] == [500]
    session.store.write("job/run-2/job.yaml", b"")
    told = recovered(session)
    assert (told.run, told.local) == (2, ())
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == ["notes.txt"]
    assert next(out.glob(".cloudrun-before-run-2/*step-500.pt")).exists(), "moved aside, not lost"
    save(out, 7)
    assert [one.step for one in recovered(session).local] == [7], "what this run saves there is its own"


def test_a_fresh_run_in_the_owners_folder_keeps_all_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "project/out"
    for step in range(1, 9):
        save(out, step)
    session, _ = make_session(tmp_path, OWN, fresh=True)
    assert recovered(session).local == ()
    assert len(list(out.glob(".cloudrun-before-run-1/*"))) == 8


def test_checkpoints_that_were_there_before_cloudrun_are_gone_on_with(tmp_path: Path) -> None:
    save(tmp_path / "project/out", 500)
    session, _ = make_session(tmp_path, OWN)
    assert [one.step for one in recovered(session).local] == [500]
    assert json.loads((tmp_path / "project/out/.cloudrun-run").read_text())["run"] == 1


def test_a_model_that_was_there_before_and_tells_no_step_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "project/out", 0, name="pretrained.pth")
    session, _ = make_session(tmp_path, OWN)
    assert recovered(session).local == ()
