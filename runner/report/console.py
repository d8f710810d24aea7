"""The story of a job, as lines for a person: one journal entry in, no more than a few lines out."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from runner.core import actions as do
from runner.core import events as on
from runner.core.actions import Action
from runner.core.events import Event
from runner.core.record import Entry
from runner.core.state import BackingOff, Checkpoint, Finished, Holding, State, Stopping, Waiting, age, owed
from runner.units import format_duration, format_size

QUIET = 10.0
"""Seconds between two lines about a store that has trouble: each request of many may fail, again and again."""

_OBJECT = re.compile(r"(\w+://[^/\s]+)/\S*: ")


class Story:
    """The lines of one session, as it goes on: what repeats itself is told now and then."""

    def __init__(self) -> None:
        self._told_of_trouble_at = -math.inf
        self._untold = 0

    def __call__(self, entry: Entry) -> list[str]:
        """What a person wants to read of the next turn of the loop."""
        lines = narrate(entry)
        return self._sparingly(entry.at, lines) if isinstance(entry.event, on.StoreStruggled) else lines

    def _sparingly(self, at: float, lines: list[str]) -> list[str]:
        first, *rest = lines
        if at - self._told_of_trouble_at < QUIET:
            self._untold += 1
            return rest
        since = f" ({self._untold} more failure(s) since the last such line)" if self._untold else ""
        self._told_of_trouble_at, self._untold = at, 0
        return [first + since, *rest]


def narrate(entry: Entry) -> list[str]:
    """What is to be told of this turn of the loop; often nothing."""
    lines = tell_event(entry.event, entry.state, entry.before)
    lines += [line for action in entry.actions for line in tell_action(action)]
    return lines + tell_phase(entry)


def tell_event(event: Event, state: State, before: State) -> list[str]:  # noqa: C901, PLR0912 - one arm per event
    match event:
        case on.LeaseHeld():
            return tell_lease_held(event)
        case on.LeaseTaken() if isinstance(before.phase, Waiting) and before.phase.reason:
            return ["taking over: this machine runs the job now"]
        case on.StandbyChanged():
            return [f"standing by: {', '.join(event.hosts)}" if event.hosts else "no other machine stands by any more"]
        case on.LeaseLost():
            return [f"{event.reason}: the trainer is stopped here, and nothing more is stored from here"]
        case on.Recovered():
            return [tell_recovered(event)]
        case on.CheckpointRejected():
            return [f"checkpoint {event.id} is set aside: {event.reason}"]
        case on.TrainerStarted():
            resumed = state.ledger.resumed
            return [f"attempt {event.attempt}, {tell_resume(resumed)}: {event.command}"]
        case on.Progressed() if state.ledger.started_over and not before.ledger.started_over:
            return tell_started_over(event, state.ledger.resumed)
        case on.TrainerExited():
            return tell_exit(event, state)
        case on.Uploaded():
            took = format_duration(event.seconds)
            return [f"checkpoint of step {event.checkpoint.step} is stored ({size(event.checkpoint)}, {took})"]
        case on.UploadFailed(gone=True):
            return [f"a checkpoint changed before it was stored; the next one is taken ({event.reason})"]
        case on.UploadFailed() | on.DoneNotMarked():
            return [f"could not store: {event.reason}"]
        case on.Pruned(reason=str(reason)):
            return [f"could not delete old checkpoints: {reason}"]
        case on.StopRequested():
            return [f"asked to leave: {event.ending.reason}"]
        case on.NoticeReceived():
            return [f"this machine goes: {event.reason} ({event.source})"]
        case on.NoticeWithdrawn():
            return [f"the notice was withdrawn ({event.source})"]
        case on.TrainerHung():
            return [f"the trainer hangs: {event.reason}"]
        case on.StoreStruggled():
            return [tell_trouble(event)]
        case on.Noticed():
            return [event.text]
        case on.TrainerJoined():
            return ["the trainer can be asked to save"]
        case _:
            return []


def tell_lease_held(event: on.LeaseHeld) -> list[str]:
    if not event.holder:
        return ["no machine has begun this job yet; standing by until one has, and leaves or dies"]
    since = datetime.fromtimestamp(event.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return [
        f"{event.host} runs this job since {since} (session {event.holder}); standing by",
        "this machine takes over when that one leaves without having finished, or dies",
    ]


def tell_trouble(event: on.StoreStruggled) -> str:
    """Which store, and what is the matter; not with which object: that is in the journal."""
    found = _OBJECT.match(event.reason)
    who, why = (found[1], event.reason[found.end() :]) if found else ("the store", event.reason)
    return f"{who} has trouble: {why}; trying again"


def tell_recovered(event: on.Recovered) -> str:
    if event.done:
        return f"run {event.run} is finished"
    known = sorted((*event.stored, *event.local), key=age)
    bad = f", {len(event.rejected)} unusable" if event.rejected else ""
    if not known:
        return f"run {event.run}: no checkpoint yet{bad}"
    return (
        f"run {event.run}: {len(event.stored)} checkpoint(s) stored, the newest known is of step {known[-1].step}{bad}"
    )


def tell_resume(resumed: Checkpoint | None) -> str:
    return f"from step {resumed.step}" if resumed else "from the beginning"


def tell_started_over(event: on.Progressed, resumed: Checkpoint | None) -> list[str]:
    if resumed is None:
        return []
    given = f"the trainer was given the checkpoint of step {resumed.step} and is at step {event.step}"
    return [f"WARNING: {given}: did it load it? What is stored is kept"]


def tell_exit(event: on.TrainerExited, state: State) -> list[str]:
    """A failure comes with the trainer's last words; an end that was asked for needs none."""
    stop = state.ledger.last_stop
    if event.not_started is not None:
        return [f"the command could not be started: {event.not_started}"]
    if event.code == 0 or stop is None or stop.cause not in ("crashed", "hung"):
        return [f"the trainer has ended ({stop.reason if stop else event.code})"]
    shown = [f"    {line}" for line in event.tail[-15:]]
    return [f"the trainer failed: {stop.reason}" + ("; its last lines:" if shown else ""), *shown]


def tell_action(action: Action) -> list[str]:
    match action:
        case do.Restore():
            return [f"restoring the checkpoint of step {action.checkpoint.step} ({size(action.checkpoint)})"]
        case do.Prune():
            return [f"deleting {id_}: {reason}" for id_, reason in action.verdicts]
        case do.KillTrainer():
            return ["the trainer does not stop: killing it and all that it started"]
        case do.Warn():
            return [f"warning: {action.alarm.text}"]
        case _:
            return []


def tell_phase(entry: Entry) -> list[str]:
    match entry.state.phase:
        case BackingOff(until=until) if isinstance(entry.event, on.TrainerExited):
            return [f"next attempt in {format_duration(until - entry.at)}"]
        case Stopping(stage="asked", until=until) if any(isinstance(a, do.AnnounceStop) for a in entry.actions):
            return [f"asking the trainer to save and stop, for at most {format_duration(until - entry.at)}"]
        case Holding() if not isinstance(entry.before.phase, Holding):
            missing = owed(entry.state.ledger)
            saved = f"step {missing.step} is not stored yet" if missing else "everything that could be saved is stored"
            return [f"{saved}; waiting for the end of this machine"]
        case Finished(ending) if ending.exit_code == 0:
            return [*warn_of_nothing(entry.state), f"done: {ending.reason}"]
        case Finished(ending):
            # Why is told by the command, at its very end, as every error is.
            return [f"leaving: exit code {ending.exit_code}"]
        case _:
            return []


def warn_of_nothing(state: State) -> list[str]:
    """A job that succeeds without one checkpoint probably saves somewhere else."""
    if state.ledger.stored or state.ledger.local or not state.ledger.done:
        return []
    where = "in CLOUDRUN_CHECKPOINT_DIR, or where checkpoints.dir says"
    return [f"WARNING: no checkpoint was ever seen {where}: nothing of this training is stored"]


def size(checkpoint: Checkpoint) -> str:
    return format_size(checkpoint.bytes)
