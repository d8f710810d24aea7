"""A trainer that talks, from the executor's orders to the events it makes. It needs no torch for that."""

from __future__ import annotations

import sys
from pathlib import Path

from runner.core import actions as do
from runner.core import events as on
from runner.core.state import Environment
from runner.supervisor.conversation import LONGEST_REMARK, MOST_REMARKS
from runner.supervisor.executor import Executor
from tests.supervisor.sessions import Posted, make_session, save, wait_for

TALK = """
import json, os, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(os.environ["CLOUDRUN_SOCKET"])
lines = peer.makefile("rw")
def say(what, **body):
    lines.write(json.dumps({what: body}) + "\\n")
    lines.flush()
def hear():
    return json.loads(lines.readline())
say("hello", version=1, rank=0, world=1, pid=os.getpid(), threads=2, cpu="AVX2")
welcome = hear()["welcome"]
"""


def run(tmp_path: Path, script: str) -> tuple[Executor, Posted]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "talk.py").write_text(TALK + script)
    outer = {"CLOUDRUN_SOCKET": "/of/an/outer/cloudrun"}
    session, posted = make_session(tmp_path, command=f"command: [{sys.executable}, talk.py]", environ=outer)
    executor = Executor(session)
    for order, answer in ((do.Recover(), on.Recovered), (do.Prepare(1), on.Prepared)):
        executor.perform(order)
        posted.wait(answer)
    executor.perform(do.StartTrainer(1))
    return executor, posted


def test_what_a_trainer_says_becomes_events(tmp_path: Path) -> None:
    script = (
        "print('step 900/1000', flush=True)\n"
        "say('progress', step=3, total=10, loss=1.5)\n"
        "say('digest', step=3, value='abc', kind='sampled')\n"
        "say('remark', text='x' * 600)\n"
        "say('progress', step=10, total=10, loss=0.5)\n"
    )
    executor, posted = run(tmp_path, script)
    assert posted.wait(on.TrainerExited).code == 0
    executor.close()
    assert posted.of(on.TrainerJoined) == [on.TrainerJoined(1, Environment(1, 2, "AVX2"))]
    said = [(event.step, event.total, event.loss) for event in posted.of(on.Progressed) if event.loss is not None]
    assert said == [(3, 10, 1.5), (10, 10, 0.5)]
    assert [event.text for event in posted.of(on.Noticed)] == [
        "the state of rank 0 at step 3 has the sampled digest abc",
        "x" * LONGEST_REMARK,
    ]
    assert isinstance(posted[-1], on.TrainerExited)


def test_a_trainer_hears_what_is_wanted_of_it(tmp_path: Path) -> None:
    script = "print(hear(), flush=True)\nprint(hear(), flush=True)\n"
    executor, posted = run(tmp_path, script)
    posted.wait(on.TrainerJoined)
    executor.perform(do.AskSave(2, "of another attempt", None))
    executor.perform(do.AskSave(1, "notice", 5.0))
    wait_for(lambda: executor._attempt is not None)
    executor.perform(do.AnnounceStop(1, 9.0))
    exited = posted.wait(on.TrainerExited)
    executor.close()
    assert exited.tail == ("{'save': {'reason': 'notice', 'deadline': 5.0}}", "{'stop': {'deadline': 9.0}}")


def test_a_rank_that_joins_late_hears_of_the_stop(tmp_path: Path) -> None:
    script = (
        "print(hear()['stop'], flush=True)\n"
        "peer = socket.socket(socket.AF_UNIX); peer.connect(os.environ['CLOUDRUN_SOCKET'])\n"
        "lines = peer.makefile('rw')\n"
        "say('hello', version=1, rank=0, world=1, pid=1)\n"
        "print(sorted(key for line in (hear(), hear()) for key in line))\n"
    )
    executor, posted = run(tmp_path, script)
    posted.wait(on.TrainerJoined)
    executor.perform(do.AnnounceStop(1, 9.0))
    assert posted.wait(on.TrainerExited).tail == ("{'deadline': 9.0}", "['stop', 'welcome']")
    executor.close()
    assert len(posted.of(on.TrainerJoined)) == 1


def test_a_direct_save_is_told_at_once_with_what_it_cost(tmp_path: Path) -> None:
    script = (
        "import shutil, time\n"
        "folder = os.environ['CLOUDRUN_CHECKPOINT_DIR']\n"
        "time.sleep(0.1)\n"
        "say('saved', path=f'{folder}/step-7.pt', step=7, seconds=1.5, metrics={'loss': 0.5})\n"
        "os.rename(f'{folder}/../step-7.pt', f'{folder}/step-7.pt')\n"
        "time.sleep(30)\n"
    )
    executor, posted = run(tmp_path, script.replace("os.rename", "time.sleep(0.2); os.rename"))
    session = executor._session
    save(session.local.run_cache(1), 7)
    saved = posted.wait(on.CheckpointSaved)
    assert (saved.checkpoint.step, saved.stall, saved.checkpoint.metrics) == (7, 1.5, (("loss", 0.5),))
    executor.perform(do.KillTrainer(1))
    posted.wait(on.TrainerExited)
    executor.close()


def test_a_trainer_that_talks_without_end_does_not_fill_the_record(tmp_path: Path) -> None:
    script = "for number in range(5000): say('remark', text=str(number))\n"
    executor, posted = run(tmp_path, script)
    assert posted.wait(on.TrainerExited).code == 0
    executor.close()
    texts = [event.text for event in posted.of(on.Noticed)]
    assert len(texts) == MOST_REMARKS
    assert "no more are kept" in texts[-1]


def test_one_that_talks_nonsense_trains_on(tmp_path: Path) -> None:
    script = "peer.sendall(b'nonsense\\n')\nprint(peer.recv(1), flush=True)\n"
    executor, posted = run(tmp_path, script)
    exited = posted.wait(on.TrainerExited)
    executor.close()
    assert (exited.code, exited.tail) == (0, ("b''",))
    assert "is not listened to any more" in posted.of(on.Noticed)[0].text
