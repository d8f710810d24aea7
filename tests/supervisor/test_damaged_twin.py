"""A checkpoint that is damaged in the store lends nothing to the ones that follow it."""

from __future__ import annotations

import shutil
from pathlib import Path

from runner.checkpoint.local import Found, scan
from runner.checkpoint.restore import verify
from runner.checkpoint.upload import Facts, upload
from runner.core import actions as do
from runner.core import events as on
from tests.supervisor.sessions import make_session
from tests.supervisor.test_attempt import recovered

FROZEN = b"weights that no step changes"


def found(folder: Path, name: str) -> Found:
    (folder / name).mkdir(parents=True)
    (folder / name / "frozen.bin").write_bytes(FROZEN)
    (folder / name / "step.txt").write_text(name)
    return next(one for one in scan(folder, "any") if one.name == name)


def test_what_is_damaged_in_the_store_is_sent_again(tmp_path: Path) -> None:
    session, posted = make_session(tmp_path, "checkpoints: {format: any}")
    folder, first = session.local.checkpoints(1), "step-000000000001.a1-abcdef"
    session.store.write(session.keys.job_yaml(1), b"")
    facts = Facts(created_at=1000.0, spec_digest="d", tool_version="1", host="a")
    upload(session.store, session.keys, 1, first, found(folder, "checkpoint-1"), facts=facts, stop=session.leaving)
    shutil.rmtree(folder)
    prefix = session.keys.checkpoint_prefix(1, first)
    session.store.write(f"{prefix}frozen.bin", FROZEN[::-1])

    executor = recovered(session, posted)
    [stored] = posted.of(on.Recovered)[0].stored
    executor.perform(do.Restore(1, stored))
    assert "frozen.bin" in posted.wait(on.CheckpointRejected).reason
    second = found(folder, "checkpoint-2")
    assert executor._ground is not None
    executor._ground.watch._keep([second])
    executor.perform(do.Upload(second.as_checkpoint(2, 1)))
    uploaded = posted.wait(on.Uploaded).checkpoint
    executor.close()
    assert verify(session.store, session.keys, 1, uploaded) == []
