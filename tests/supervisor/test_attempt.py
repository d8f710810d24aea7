"""The trainer's life, from the executor's orders to its last event."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from runner.core import actions as do
from runner.core import events as on
from runner.errors import SourceChanged, StoreUnreachable
from runner.storage.memory import Fault, MemoryStore
from runner.supervisor import guard
from runner.supervisor.executor import Executor
from runner.supervisor.session import Session
from tests.supervisor.sessions import Posted, make_session, save, save_here, wait_for


def recovered(session: Session, posted: Posted) -> Executor:
    executor = Executor(session)
    executor.perform(do.Recover())
    posted.wait(on.Recovered)
    executor.perform(do.Prepare(1))
    posted.wait(on.Prepared)
    return executor


def python(code: str) -> str:
    return f"command: [{sys.executable}, -c, {code!r}]"


def test_a_life_is_told_in_order_and_its_last_progress_is_not_lost(tmp_path: Path) -> None:
    code = "print('step 1/9', flush=True); import time; time.sleep(1.2); print('step 2/9', flush=True)"
    session, posted = make_session(tmp_path, command=python(code))
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    exited = posted.wait(on.TrainerExited)
    executor.close()
    assert (exited.code, exited.tail) == (0, ("step 1/9", "step 2/9"))
    told = posted[posted.index(posted.of(on.TrainerStarted)[0]) :]
    assert [type(event) for event in told] == [on.TrainerStarted, on.Progressed, on.Progressed, on.TrainerExited]
    assert posted.of(on.Progressed)[-1].step == 2


def test_setup_and_trainer_share_a_log_in_the_order_of_their_words(tmp_path: Path) -> None:
    session, posted = make_session(
        tmp_path, "setup: \"head -c 2500000 /dev/zero | tr '\\\\0' s\"", command=python("print('trained')")
    )
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    posted.wait(on.TrainerExited)
    executor.close()
    segments = sorted(session.local.log_segment(1, "a1-abcdef", 1).parent.iterdir())
    assert b"".join(path.read_bytes() for path in segments) == b"s" * 2_500_000 + b"trained\n"


def test_a_command_that_does_not_exist_ends_as_every_attempt_does(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path, command="command: [/no/such/program]")
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    assert "/no/such/program" in str(posted.wait(on.TrainerExited).not_started)
    executor.close()


def test_what_stands_in_the_way_of_a_start_is_told_not_raised(tmp_path: Path) -> None:
    """As a full disk would: nothing can be written where the script should lie."""
    session, posted = make_session(tmp_path, command="script: 'true'")
    executor = recovered(session, posted)
    (session.local.run_cache(1) / "script.sh").mkdir()
    executor.perform(do.StartTrainer(1))
    assert "script.sh" in str(posted.wait(on.TrainerExited).not_started)
    executor.close()


def test_a_checkpoint_folder_that_cannot_be_read_at_the_end_is_no_good_end(tmp_path: Path) -> None:
    code = "import os, shutil; d = os.environ['CLOUDRUN_CHECKPOINT_DIR']; shutil.rmtree(d); open(d, 'w')"
    session, posted = make_session(tmp_path, command=python(code))
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    exited = posted.wait(on.TrainerExited)
    executor.close()
    assert exited.code != 0, "nobody knows what its last checkpoint was"
    assert exited.not_started is not None


def test_looking_goes_on_after_a_look_that_failed(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path, command=python("import time; time.sleep(60)"))
    executor = recovered(session, posted)
    folder = session.local.checkpoints(1)
    executor.perform(do.StartTrainer(1))
    posted.wait(on.TrainerStarted)
    shutil.rmtree(folder)
    folder.write_text("no folder")
    assert "cannot look for checkpoints" in posted.wait(on.Noticed).text
    folder.unlink()
    save(folder, 3)
    assert posted.wait(on.CheckpointSaved).checkpoint.step == 3
    executor.perform(do.KillTrainer(1))
    assert posted.wait(on.TrainerExited).code == -signal.SIGKILL
    executor.close()
    assert len(posted.of(on.Noticed)) == 1


def test_an_announcement_that_comes_late_does_not_stop_the_next_attempt(tmp_path: Path) -> None:
    code = "import os, time; time.sleep(1); raise SystemExit(os.path.exists(os.environ['CLOUDRUN_STOP_FILE']))"
    session, posted = make_session(tmp_path, command=python(code))
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(2))
    posted.wait(on.TrainerStarted)
    executor.perform(do.AnnounceStop(1, 1e10))
    assert posted.wait(on.TrainerExited).code == 0
    executor.perform(do.StartTrainer(3))
    wait_for(lambda: len(posted.of(on.TrainerStarted)) == 2)
    executor.perform(do.AnnounceStop(3, 1e10))
    wait_for(lambda: len(posted.of(on.TrainerExited)) == 2)
    executor.close()
    assert posted.of(on.TrainerExited)[-1].code == 1, "its own one it does see"


def test_a_signal_right_after_the_start_is_not_lost(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path, command="command: [sleep, '60']")
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    executor.perform(do.SignalTrainer(1, "ranks"))
    assert posted.wait(on.TrainerExited).code == -signal.SIGTERM
    executor.close()


@pytest.mark.parametrize("touched", [False, True])
def test_an_upload_that_was_disturbed_is_tried_again_unless_its_files_changed(tmp_path: Path, *, touched: bool) -> None:
    store = MemoryStore(
        lambda operation, _key, nth: Fault(SourceChanged("changed")) if operation == "upload" and nth == 0 else None
    )
    session, posted = make_session(tmp_path, store=store)
    path = save_here(session, 5)
    executor = recovered(session, posted)
    (checkpoint,) = posted.of(on.Recovered)[0].local
    if touched:
        os.utime(path)
    executor.perform(do.Upload(checkpoint))
    failed = posted.wait(on.UploadFailed)
    assert (failed.gone, failed.retryable) == (touched, True)
    assert [saved.checkpoint.id for saved in posted.of(on.CheckpointSaved)] == [checkpoint.id] * touched
    executor.close()


def test_an_upload_whose_folder_has_gone_is_answered_all_the_same(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path)
    folder = session.local.checkpoints(1)
    save_here(session, 5)
    executor = recovered(session, posted)
    shutil.rmtree(folder)
    folder.write_text("no folder")
    executor.perform(do.Upload(posted.of(on.Recovered)[0].local[0]))
    assert posted.wait(on.UploadFailed).gone
    executor.close()


def test_closing_does_not_wait_for_ever_for_a_store_that_hangs(tmp_path: Path) -> None:
    store = MemoryStore(lambda *_: Fault(StoreUnreachable("late"), delay=3.0))
    session, posted = make_session(tmp_path, store=store)
    executor = Executor(session)
    executor.perform(do.Recover())
    began = time.monotonic()
    executor.close(patience=0.2)
    assert time.monotonic() - began < 2.0
    assert posted == []


def test_closing_ends_a_trainer_that_still_runs(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path, command="command: [sleep, '60']")
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    pid = posted.wait(on.TrainerStarted).pid
    executor.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_save_is_asked_for_by_the_owners_signal(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); "
        "pathlib.Path('ready').touch(); signal.pause()"
    )
    session, posted = make_session(tmp_path, "checkpoints: {ask: SIGUSR1}", command=python(code))
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    assert posted.wait(on.TrainerJoined).attempt == 1
    wait_for((tmp_path / "project/ready").exists)
    executor.perform(do.AskSave(1, "cadence"))
    assert posted.wait(on.TrainerExited).code == 7
    executor.close()


def test_a_trainer_without_a_handler_is_not_killed_by_the_question(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path, "checkpoints: {ask: SIGUSR1}", command="command: [sleep, '60']")
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    posted.wait(on.TrainerJoined)
    for _ in range(2):
        executor.perform(do.AskSave(1, "cadence"))
    assert "the trainer has no handler for SIGUSR1" in posted.wait(on.Noticed).text
    executor.perform(do.KillTrainer(1))
    assert posted.wait(on.TrainerExited).code == -signal.SIGKILL
    executor.close()
    assert len(posted.of(on.Noticed)) == 1, "said once"


def test_the_handlers_of_a_process() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert guard.handles(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert not guard.handles(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert not guard.handles(2**22 + 1, signal.SIGUSR2)


def test_with_inject_the_trainers_python_finds_our_hook_first(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['PYTHONPATH']); print(sys.modules['sitecustomize'].__file__)"
    session, posted = make_session(
        tmp_path, "checkpoints: {inject: true}", "env: {PYTHONPATH: /of/the/owner}", command=python(code)
    )
    executor = recovered(session, posted)
    executor.perform(do.StartTrainer(1))
    path, module = posted.wait(on.TrainerExited).tail
    executor.close()
    assert path.endswith("inject:/of/the/owner")
    assert module == path.partition(":")[0] + "/sitecustomize.py"
