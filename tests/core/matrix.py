"""Every phase and every event, as examples: what the pinned table and the diagram in the docs are made from."""

from __future__ import annotations

from dataclasses import replace

from runner.core import events as on
from runner.core.decide import decide
from runner.core.events import Event
from runner.core.policy import Policy
from runner.core.state import (
    BackingOff,
    Cadence,
    Checkpoint,
    Ending,
    Finished,
    Flushing,
    Hold,
    Holding,
    Lease,
    Leave,
    Ledger,
    Phase,
    Preparing,
    Restart,
    Running,
    Saves,
    State,
    Stopping,
    Uploads,
    Waiting,
)

NOW = 1000.0
POLICY = Policy()


def checkpoint(step: int, *, local: bool = False) -> Checkpoint:
    name = f"step-{step}"
    return Checkpoint(f"local:{name}" if local else f"{name}.a1-abcdef", step, name, 1, 1, 10, f"{name}{local}", 500.0)


STORED, SAVED = checkpoint(10), checkpoint(20, local=True)
STOP = Ending("stopped", 143, "stop")
TERM = Ending("preempted", 75, "SIGTERM")
DONE = Ending("succeeded", 0, "the trainer finished")
HOLD = Hold("cloud", 1100.0, "taken")
RUNNING = Running(900.0, STORED, 10)
OURS = Lease(True, "abcdef", "host-a", 2)

PHASES: dict[str, Phase] = {
    "Waiting": Waiting(),
    "Waiting, standing by": Waiting("host-b runs this job"),
    "Preparing": Preparing(900.0),
    "Preparing, restoring": Preparing(900.0, STORED),
    "Running": RUNNING,
    "Running, can be asked": RUNNING,
    "Stopping to leave, asked": Stopping(RUNNING, Leave(TERM), "asked", 1010.0),
    "Stopping to leave, terminated": Stopping(RUNNING, Leave(TERM), "terminated", 1002.0),
    "Stopping to leave, killed": Stopping(RUNNING, Leave(TERM), "killed", 1005.0),
    "Stopping to hold": Stopping(RUNNING, HOLD, "asked", 1010.0),
    "Stopping to restart": Stopping(RUNNING, Restart("hung", hung=True), "asked", 1010.0),
    "Flushing after success": Flushing(Leave(DONE), 990.0, 4600.0),
    "Flushing after a stop": Flushing(Leave(TERM), 990.0, 1030.0, TERM),
    "Flushing to hold": Flushing(HOLD, 990.0, 1030.0, TERM),
    "BackingOff": BackingOff(1005.0, "exit code 1"),
    "Holding": Holding(HOLD),
    "Finished": Finished(DONE),
}

EVENTS: dict[str, Event] = {
    "Started": on.Started(),
    "Woke": on.Woke(),
    "LeaseTaken": on.LeaseTaken("abcdef", "host-a", 3),
    "LeaseHeld": on.LeaseHeld("fedcba", "host-b", 2, 500.0),
    "StandbyChanged": on.StandbyChanged(("host-b",)),
    "LeaseLost": on.LeaseLost("another machine has taken over: host-b"),
    "Recovered, nothing": on.Recovered(1, 0),
    "Recovered, stored": on.Recovered(1, 1, (STORED,)),
    "Recovered, done": on.Recovered(1, 1, (STORED,), done=True),
    "Recovered, trained": on.Recovered(1, 1, (STORED,), (SAVED,), trained=True),
    "RecoverFailed": on.RecoverFailed("no answer", 69),
    "Prepared": on.Prepared(2),
    "PrepareFailed": on.PrepareFailed(2, "no data", 78),
    "Restored": on.Restored(2, STORED.id, "/c/step-10"),
    "CheckpointRejected": on.CheckpointRejected(2, STORED.id, "bad digest"),
    "TrainerStarted": on.TrainerStarted(2, 42, "python train.py"),
    "TrainerJoined": on.TrainerJoined(2),
    "Progressed": on.Progressed(2, 15),
    "CheckpointSaved": on.CheckpointSaved(2, SAVED),
    "TrainerExited, 0": on.TrainerExited(2, 0),
    "TrainerExited, 1": on.TrainerExited(2, 1),
    "TrainerExited, killed": on.TrainerExited(2, -9),
    "TrainerExited, fatal": on.TrainerExited(2, 1, fatal="CUDA error"),
    "TrainerExited, not started": on.TrainerExited(2, 127, not_started="no such file"),
    "TrainerExited, stale": on.TrainerExited(1, 0),
    "TrainerHung": on.TrainerHung(2, "no progress"),
    "Uploaded": on.Uploaded(SAVED.id, replace(SAVED, id="step-20.a2-abcdef", time=NOW), 3.0),
    "UploadFailed": on.UploadFailed(SAVED.id, "no answer"),
    "UploadFailed, hopeless": on.UploadFailed(SAVED.id, "denied", retryable=False),
    "UploadFailed, gone": on.UploadFailed(SAVED.id, "vanished", gone=True),
    "Pruned": on.Pruned(("step-5.a1-abcdef",)),
    "DoneMarked": on.DoneMarked(),
    "DoneNotMarked": on.DoneNotMarked("no answer"),
    "StopRequested": on.StopRequested(STOP),
    "StopRequested, now": on.StopRequested(STOP, now=True),
    "NoticeReceived": on.NoticeReceived("cloud", 1120.0, "taken"),
    "NoticeWithdrawn": on.NoticeWithdrawn("cloud"),
    "DeadlineKnown": on.DeadlineKnown("lease", 1600.0, "the end of the lease"),
    "DeadlineKnown, near": on.DeadlineKnown("lease", 1020.0, "the end of the lease"),
    "StoreStruggled": on.StoreStruggled("write", "no answer", 1.0),
    "Noticed": on.Noticed("something"),
}


def ledger_for(phase: Phase) -> Ledger:
    """What is known: the lease, a stored checkpoint, and in a flush a newer one that is on its way."""
    if isinstance(phase, Waiting):
        return Ledger(lease=Lease(False, "fedcba", "host-b", 2)) if phase.reason else Ledger()
    lease = replace(OURS, ours=not isinstance(phase, Holding))
    known = Ledger(lease, 2, run=1, attempt=2, stored=(STORED,), prepared=not isinstance(phase, Preparing))
    if isinstance(phase, Flushing):
        return replace(known, local=(SAVED,), uploads=Uploads(current=SAVED, last_at=990.0))
    return known


def known_in(name: str) -> Ledger:
    """As :func:`ledger_for`; where the name says so, with a trainer that can be asked for a save, in a while."""
    ledger = ledger_for(PHASES[name])
    if name != "Running, can be asked":
        return ledger
    return replace(
        ledger, saves=Saves(askable=True, since=910.0, cost=0.5), cadence=Cadence(120.0, 60.0, "two minutes")
    )


def outcome(name: str, event: Event) -> str:
    """The next phase and the actions, in one line."""
    state, actions = decide(POLICY, State(PHASES[name], known_in(name)), event, NOW)
    told = type(state.phase).__name__
    if isinstance(state.phase, Finished):
        told += f"({state.phase.ending.outcome}, {state.phase.ending.exit_code})"
    if isinstance(state.phase, Stopping):
        told += f"({type(state.phase.aim).__name__}, {state.phase.stage})"
    if isinstance(state.phase, Flushing):
        aim = state.phase.aim
        told += f"({aim.ending.exit_code if isinstance(aim, Leave) else 'Hold'})"
    return " ".join([told, *(f"+{type(action).__name__}" for action in actions)])


def table() -> str:
    """All pairs. Lines with the same answer as staying put are written as a dash, so that what matters stands out."""
    lines = []
    for phase_name in PHASES:
        stays = outcome(phase_name, on.Noticed("nothing"))
        lines.append(f"{phase_name}  (by itself: {stays})")
        for event_name, event in EVENTS.items():
            answer = outcome(phase_name, event)
            lines.append(f"    {event_name:<27} {'-' if answer == stays else answer}")
    return "\n".join(lines) + "\n"


def main() -> None:
    print(table(), end="")


if __name__ == "__main__":
    main()
