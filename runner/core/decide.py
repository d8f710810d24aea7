"""The rules: ``decide(policy, state, event, now)`` gives the next state and what to do.

Three steps. *Record* the fact in the ledger, whatever the phase. *React*: what this event means in this phase.
*Settle*: what follows from the state alone (an upload that is due, a flush that is complete). ``wake_at`` says when to
ask again although nothing has happened.

Pure: reads no clock, touches nothing, gives equal answers to equal questions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from runner.core import actions as do
from runner.core import cadence
from runner.core import events as on
from runner.core.actions import Action
from runner.core.alarms import alarm_at, alarms, resumed, with_loss
from runner.core.events import Event
from runner.core.notice import seconds_to_save
from runner.core.policy import Policy
from runner.core.restart import FOREIGN_KILLS, backoff, describe, judge, ran_out_of_disk
from runner.core.retention import retain
from runner.core.state import (
    BackingOff,
    Checkpoint,
    Ending,
    Finished,
    Flushing,
    History,
    Hold,
    Holding,
    LastStop,
    Lease,
    Leave,
    Ledger,
    Losses,
    Machine,
    Phase,
    Preparing,
    Reached,
    Rejected,
    Restart,
    Running,
    State,
    Stopping,
    Uploads,
    Waiting,
    good,
    is_usable,
    may_write,
    newest_stored,
    owed,
    place,
    usable,
)

Step = tuple[State, tuple[Action, ...]]

# Exit codes as the core needs them; runner.errors.ExitCode is their home, and a test holds the two together.
SUCCEEDED, TRAINER_FAILED, STALLED, NOT_STORED, PREEMPTED = 0, 70, 71, 73, 75

SHORTEST_GRACE = 0.1
SECONDS_TO_TERMINATE = 2.0
SECONDS_TO_KILL = 5.0
UPLOAD_RETRY_FIRST = 5.0
UPLOAD_RETRY_LIMIT = 300.0
LOAD_FAILURES_ALLOWED = 2
# A trainer that dies later than this had loaded its checkpoint, whatever it has printed.
LONGEST_LOAD = 600.0


def decide(policy: Policy, state: State, event: Event, now: float) -> Step:
    """The next state and the actions that lead there. Events of an attempt that is over change nothing."""
    if is_stale(state, event):
        return state, ()
    state = replace(state, ledger=cadence.paced(policy, record(state.ledger, event, now), event, now))
    state, first = react(policy, state, event, now)
    state, then = settle(policy, state, now)
    return state, first + then


def wake_at(policy: Policy, state: State) -> float:
    """When ``decide`` wants to see Woke, in epoch seconds; infinity when only an event can change something."""
    match state.phase:
        case Stopping(until=until) | BackingOff(until=until):
            own = until
        case Flushing(give_up_at=give_up_at) if not is_busy(state.ledger):
            own = give_up_at
        case _:
            own = math.inf
    return min(own, upload_due_at(policy, state), mark_due_at(state), cadence.next_ask(state).at, alarm_at(state))


def is_stale(state: State, event: Event) -> bool:
    """True for an event of another attempt than the present one. A complete checkpoint is a fact whoever wrote it."""
    if isinstance(event, on.Recovered):
        return not isinstance(state.phase, Waiting)
    if isinstance(event, on.CheckpointSaved):
        return False
    attempt = getattr(event, "attempt", None)
    return attempt is not None and attempt != state.ledger.attempt


# -- record ------------------------------------------------------------------------------------------------------------


def record(ledger: Ledger, event: Event, now: float) -> Ledger:  # noqa: C901, PLR0912 - one arm per fact
    """The ledger with this fact in it."""
    match event:
        case on.Started(age=age):
            return replace(ledger, machine=Machine(now, age))
        case on.LeaseTaken() | on.LeaseHeld() | on.StandbyChanged() | on.LeaseLost():
            return replace(ledger, lease=lease_after(ledger.lease or Lease(), event))
        case on.Recovered():
            return record_recovered(ledger, event)
        case on.Prepared():
            return replace(ledger, prepared=True)
        case on.CheckpointRejected():
            return reject(ledger, event.id, event.reason)
        case on.Progressed():
            return record_progress(ledger, event, now)
        case on.TrainerJoined():
            environment = event.environment or ledger.environment
            return replace(ledger, saves=cadence.joined(ledger.saves), environment=environment)
        case on.DeadlineKnown():
            return replace(ledger, deadlines=cadence.with_deadline(ledger.deadlines, event))
        case on.CheckpointSaved():
            return record_saved(ledger, event, now)
        case on.TrainerExited():
            return record_exit(ledger, event)
        case on.Uploaded():
            return record_uploaded(ledger, event)
        case on.UploadFailed(gone=True):
            return record_gone(ledger, event)
        case on.UploadFailed(reason=reason, retryable=retryable) | on.DoneNotMarked(reason=reason, retryable=retryable):
            return record_upload_failure(ledger, reason, retryable, now)
        case on.Pruned():
            gone = () if event.reason else event.ids
            return replace(ledger, stored=tuple(c for c in ledger.stored if c.id not in gone), pruning=())
        case on.DoneMarked():
            return replace(ledger, done=True, marking=False)
        case _:
            return ledger


def lease_after(lease: Lease, event: on.LeaseTaken | on.LeaseHeld | on.StandbyChanged | on.LeaseLost) -> Lease:
    match event:
        case on.LeaseTaken(holder, host, epoch):
            return Lease(ours=True, holder=holder, host=host, epoch=epoch)
        case on.LeaseHeld(holder, host, epoch, _, standby):
            return Lease(ours=False, holder=holder, host=host, epoch=epoch, standby=standby)
        case on.StandbyChanged(hosts):
            return replace(lease, standby=hosts)
        case on.LeaseLost(reason):
            return replace(lease, ours=False, lost=reason)


def record_recovered(ledger: Ledger, event: on.Recovered) -> Ledger:
    known = {checkpoint.signature for checkpoint in event.stored}
    return replace(
        ledger,
        epoch=event.epoch,
        run=event.run,
        attempt=event.attempt,
        stored=event.stored,
        local=tuple(checkpoint for checkpoint in event.local if checkpoint.signature not in known),
        rejected=event.rejected,
        done=event.done,
        trained=event.trained,
        **learned(ledger, event.history),
    )


def learned(ledger: Ledger, history: History) -> dict[str, Any]:
    """What changes by what earlier supervisors have learned. What they do not know stays as we know it."""
    saves, uploads = ledger.saves, ledger.uploads
    cost = saves.cost if history.cost is None else history.cost
    return {
        "history": history,
        "saves": replace(saves, cost=cost, persist=history.persist or saves.persist),
        "uploads": replace(uploads, seconds=history.upload or uploads.seconds),
        "losses": Losses(recent=history.losses) if history.losses.count else ledger.losses,
    }


def reject(ledger: Ledger, wanted: str, reason: str, signature: str | None = None) -> Ledger:
    """Set a checkpoint aside, by its id, and with a ``signature`` every copy of it, also one that is yet to come.

    A local one is forgotten: its name may be written anew.
    """
    step = next((one.step for one in (*ledger.stored, *ledger.local) if one.id == wanted), None)
    others = tuple(rejected for rejected in ledger.rejected if rejected.id != wanted)
    return replace(
        ledger,
        rejected=(*others, Rejected(wanted, step, reason, signature)),
        local=tuple(checkpoint for checkpoint in ledger.local if checkpoint.id != wanted),
    )


def record_progress(ledger: Ledger, event: on.Progressed, now: float) -> Ledger:
    first = ledger.reached is None
    behind = ledger.resumed is not None and event.step < ledger.resumed.step
    return replace(
        ledger,
        reached=Reached(event.step, event.total, event.rate, now),
        started_over=ledger.started_over or (first and behind),
        saves=cadence.stepped(ledger.saves, now),
        losses=ledger.losses if event.loss is None else with_loss(ledger.losses, event.loss),
    )


def record_saved(ledger: Ledger, event: on.CheckpointSaved, now: float) -> Ledger:
    saved = event.checkpoint
    known = (*ledger.stored, *ledger.local)
    if any(checkpoint.signature == saved.signature for checkpoint in known):
        return ledger
    if not event.step_known:
        counted = max((checkpoint.step for checkpoint in known), default=0) + 1
        saved = replace(saved, step=ledger.reached.step if ledger.reached else counted)
    saved = replace(saved, epoch=epoch_of(ledger, saved))
    others = tuple(checkpoint for checkpoint in ledger.local if checkpoint.id != saved.id)
    return replace(
        ledger,
        local=(*others, saved),
        # The trainer wrote this name anew: what was wrong with the old content says nothing about the new one.
        rejected=tuple(rejected for rejected in ledger.rejected if rejected.id != saved.id),
        saves=cadence.saved(ledger.saves, event, now) if event.attempt == ledger.attempt else ledger.saves,
    )


def epoch_of(ledger: Ledger, saved: Checkpoint) -> int:
    """Of a new checkpoint. What a trainer saves that started over does not beat what it was given."""
    behind = ledger.resumed is not None and saved.step < ledger.resumed.step
    return ledger.resumed.epoch if ledger.resumed is not None and behind else ledger.epoch


def record_exit(ledger: Ledger, event: on.TrainerExited) -> Ledger:
    stop = LastStop("exited" if event.code == 0 else "crashed", describe(event.code), event.code)
    return replace(ledger, last_stop=stop)


def record_uploaded(ledger: Ledger, event: on.Uploaded) -> Ledger:
    done = event.checkpoint
    return replace(
        ledger,
        stored=(*(c for c in ledger.stored if c.id != done.id), done),
        local=tuple(c for c in ledger.local if c.signature != done.signature),
        uploads=Uploads(last_at=ledger.uploads.last_at, seconds=event.seconds),
        prune_due=True,
    )


def record_gone(ledger: Ledger, event: on.UploadFailed) -> Ledger:
    lost = ledger.uploads.current
    return replace(
        ledger,
        local=tuple(c for c in ledger.local if lost is None or c.id != lost.id or c.signature != lost.signature),
        uploads=replace(ledger.uploads, current=None, problem=event.reason),
    )


def record_upload_failure(ledger: Ledger, reason: str, retryable: bool, now: float) -> Ledger:
    failures = ledger.uploads.failures + 1
    wait = min(UPLOAD_RETRY_FIRST * 2.0 ** min(failures - 1, 30), UPLOAD_RETRY_LIMIT)
    uploads = replace(
        ledger.uploads,
        current=None,
        failures=failures,
        retry_at=now + (wait if retryable else UPLOAD_RETRY_LIMIT),
        problem=reason,
        hopeless=not retryable,
    )
    return replace(ledger, uploads=uploads, marking=False)


# -- react -------------------------------------------------------------------------------------------------------------


def react(policy: Policy, state: State, event: Event, now: float) -> Step:
    """What this event means in this phase."""
    if isinstance(event, on.LeaseLost):
        return react_to_loss(state, event, now)
    match state.phase:
        case Waiting() as phase:
            return react_waiting(policy, state, phase, event, now)
        case Preparing() as phase:
            return react_preparing(policy, state, phase, event, now)
        case Running() as phase:
            return react_running(policy, state, phase, event, now)
        case Stopping() as phase:
            return react_stopping(policy, state, phase, event, now)
        case Flushing() as phase:
            return react_flushing(policy, state, phase, event, now)
        case BackingOff() as phase:
            return react_backing_off(policy, state, phase, event, now)
        case Holding() as phase:
            return react_holding(policy, state, phase, event, now)
        case Finished():
            return state, ()


def react_to_loss(state: State, event: on.LeaseLost, now: float) -> Step:
    """The job is another machine's: the trainer goes without a save, and so do we."""
    ending = Ending("preempted", PREEMPTED, event.reason)
    match state.phase:
        case Running() as phase:
            return terminate(to_phase(state, stopping(phase, Leave(ending), now, hurried=True)), now)
        case Stopping() as phase:
            return harder(to_phase(state, replace(phase, aim=Leave(ending), hurried=True)), now)
        case Holding() | Finished():
            return state, ()
        case _:
            return finish(state, ending)


def react_waiting(policy: Policy, state: State, phase: Waiting, event: Event, now: float) -> Step:
    match event:
        case on.Started():
            return state, (do.TakeLease(),)
        case on.LeaseTaken():
            return to(state, Waiting(), do.Recover())
        case on.LeaseHeld(host=host):
            reason = f"{host} runs this job" if host else "no machine has begun this job"
            return to(state, Waiting(reason), *(() if phase.reason else (do.WarmUp(),)))
        case on.Recovered(done=True):
            return finish(state, Ending("succeeded", SUCCEEDED, "this run is already finished"))
        case on.Recovered(trained=True):
            return flush_success(policy, state, now)
        case on.Recovered():
            return begin_attempt(state, now)
        case on.RecoverFailed():
            return finish(state, Ending("failed", event.exit_code, event.reason, event.hint))
        case on.StopRequested():
            return finish(state, event.ending)
        case on.NoticeReceived():
            return finish(state, Ending("preempted", PREEMPTED, event.reason))
        case _:
            return state, ()


def react_preparing(policy: Policy, state: State, phase: Preparing, event: Event, now: float) -> Step:
    match event:
        case on.Prepared() | on.CheckpointRejected():
            return choose_checkpoint(state, now)
        case on.Restored() if phase.restoring is not None and event.id == phase.restoring.id:
            return start_trainer(state, phase.restoring, event.path, now)
        case on.UploadFailed() if phase.restoring is not None and not is_usable(state.ledger, phase.restoring):
            # Its files vanished while they were on their way to the store, and to the trainer.
            return choose_checkpoint(state, now)
        case on.PrepareFailed():
            ending = Ending("failed", event.exit_code, event.reason, event.hint)
            return flush(policy, state, Leave(ending), now)
        case _:
            return react_between(policy, state, event, now)


def react_between(policy: Policy, state: State, event: Event, now: float) -> Step:
    """No trainer runs: somebody may want us to leave all the same."""
    match event:
        case on.StopRequested():
            return flush(policy, state, Leave(event.ending), now, hurried=event.now)
        case on.NoticeReceived():
            return flush(policy, state, Hold(event.source, event.deadline, event.reason), now)
        case _:
            return state, ()


def react_running(policy: Policy, state: State, phase: Running, event: Event, now: float) -> Step:
    match event:
        case on.TrainerExited():
            return after_exit(policy, state, phase, event, now)
        case on.StopRequested(now=True):
            return terminate(to_phase(state, stopping(phase, Leave(event.ending), now, hurried=True)), now)
        case on.StopRequested():
            return ask_to_stop(state, phase, Leave(event.ending), now, policy.grace)
        case on.NoticeReceived():
            aim = Hold(event.source, event.deadline, event.reason)
            return ask_to_stop(state, phase, aim, now, time_before(state, event.deadline, now))
        case on.TrainerHung():
            return ask_to_stop(state, phase, Restart(event.reason, hung=True), now, policy.grace)
        case _:
            return state, ()


def react_stopping(policy: Policy, state: State, phase: Stopping, event: Event, now: float) -> Step:
    match event:
        case on.TrainerExited():
            return after_stop(policy, state, phase, event, now)
        case on.StopRequested(now=False) if not isinstance(phase.aim, Leave):
            until = min(phase.until, now + max(policy.grace, SHORTEST_GRACE))
            return to(state, replace(phase, aim=Leave(event.ending), until=until))
        case on.StopRequested():
            return harder(to_phase(state, replace(phase, aim=Leave(event.ending), hurried=True)), now)
        case on.NoticeReceived():
            until = min(phase.until, now + time_before(state, event.deadline, now))
            keep = phase.aim if isinstance(phase.aim, Leave) else Hold(event.source, event.deadline, event.reason)
            return to(state, replace(phase, aim=keep, until=until))
        case on.NoticeWithdrawn() if isinstance(phase.aim, Hold) and phase.aim.source == event.source:
            return to(state, replace(phase, aim=Restart("the notice was withdrawn")))
        case on.CheckpointSaved() if now < phase.until:
            return to(state, replace(phase, saved=True))
        case _ if now >= phase.until:
            return harder(state, now)
        case _:
            return state, ()


def react_flushing(policy: Policy, state: State, phase: Flushing, event: Event, now: float) -> Step:
    match event:
        case on.StopRequested():
            return to(state, shorten(policy, phase, event, now))
        case on.NoticeReceived() if isinstance(phase.aim, Hold):
            return to(state, replace(phase, aim=Hold(event.source, event.deadline, event.reason)))
        case on.NoticeWithdrawn() if isinstance(phase.aim, Hold) and phase.aim.source == event.source:
            return begin_attempt(state, now)
        case _:
            return state, ()


def shorten(policy: Policy, phase: Flushing, event: on.StopRequested, now: float) -> Flushing:
    """A stop request during a flush: the first one leaves it the grace period, another one ends the wait."""
    if isinstance(phase.aim, Hold):
        left = replace(phase, aim=Leave(event.ending), otherwise=event.ending)
        return replace(left, give_up_at=now, hurried=True) if event.now else left
    ending = phase.aim.ending
    nobody_asked = ending.outcome not in ("stopped", "preempted") and phase.otherwise in (None, ending)
    if nobody_asked and not event.now:
        return replace(phase, otherwise=event.ending, give_up_at=min(phase.give_up_at, now + policy.grace))
    otherwise = event.ending if is_success(phase.aim) else ending
    return replace(phase, otherwise=otherwise, give_up_at=now, hurried=True)


def react_backing_off(policy: Policy, state: State, phase: BackingOff, event: Event, now: float) -> Step:
    if isinstance(event, on.StopRequested | on.NoticeReceived):
        return react_between(policy, state, event, now)
    return begin_attempt(state, now) if now >= phase.until else (state, ())


def react_holding(policy: Policy, state: State, phase: Holding, event: Event, now: float) -> Step:
    match event:
        case on.NoticeReceived():
            return to(state, Holding(Hold(event.source, event.deadline, event.reason)))
        case on.NoticeWithdrawn() if event.source == phase.notice.source and not may_write(state.ledger):
            return to(state, Waiting(), do.TakeLease())
        case on.NoticeWithdrawn() if event.source == phase.notice.source:
            return begin_attempt(state, now)
        case _:
            return react_between(policy, state, event, now)


# -- the steps of an attempt -------------------------------------------------------------------------------------------


def begin_attempt(state: State, now: float) -> Step:
    """Number the next attempt and get ready for it; what is ready already is not done again."""
    ledger = replace(state.ledger, attempt=state.ledger.attempt + 1, reached=None, resumed=None)
    state = State(Preparing(now), ledger)
    if not ledger.prepared:
        return state, (do.Prepare(ledger.attempt),)
    return choose_checkpoint(state, now)


def choose_checkpoint(state: State, now: float) -> Step:
    """Restore the best usable checkpoint. Never a silent fresh start."""
    ledger = state.ledger
    best = next(iter(usable(ledger)), None)
    if best is not None:
        return to(state, Preparing(now, restoring=best), do.Restore(ledger.attempt, best))
    if ledger.rejected:
        return finish(state, none_usable(ledger))
    return start_trainer(state, None, "", now)


def none_usable(ledger: Ledger) -> Ending:
    worst = ledger.rejected[-1]
    return Ending(
        "failed",
        TRAINER_FAILED,
        f"this run has {len(ledger.rejected)} checkpoint(s) and none is usable; {worst.id}: {worst.reason}",
        "look at them with: cloudrun checkpoints verify JOB; or begin a new run: the same command with --fresh",
    )


def start_trainer(state: State, resume: Checkpoint | None, path: str, now: float) -> Step:
    newest = newest_step(state.ledger)
    ledger = replace(
        state.ledger,
        resumed=resume,
        reached=None,
        started_over=False,
        saves=cadence.next_attempt(state.ledger.saves),
        losses=resumed(state.ledger.losses),
        environment=None,
    )
    return State(Running(now, resume, newest), ledger), (do.StartTrainer(ledger.attempt, resume, path),)


def newest_step(ledger: Ledger) -> int:
    """The step of the newest usable checkpoint, which need not be the highest; -1 for none."""
    return next((checkpoint.step for checkpoint in usable(ledger)), -1)


def ask_to_stop(state: State, running: Running, aim: Leave | Hold | Restart, now: float, grace: float) -> Step:
    attempt = state.ledger.attempt
    deadline = aim.deadline if isinstance(aim, Hold) else now + grace
    phase = stopping(running, aim, now + max(grace, SHORTEST_GRACE))
    return to(state, phase, do.AnnounceStop(attempt, deadline), do.SignalTrainer(attempt, "ranks"))


def stopping(running: Running, aim: Leave | Hold | Restart, until: float, *, hurried: bool = False) -> Stopping:
    return Stopping(running, aim, "asked", until, hurried)


def terminate(state: State, now: float) -> Step:
    phase = state.phase
    assert isinstance(phase, Stopping)
    terminated = replace(phase, stage="terminated", until=now + SECONDS_TO_TERMINATE)
    return to(state, terminated, do.SignalTrainer(state.ledger.attempt, "group"))


def harder(state: State, now: float) -> Step:
    """The next stage of force."""
    phase = state.phase
    assert isinstance(phase, Stopping)
    if phase.stage == "asked":
        return terminate(state, now)
    killed = replace(phase, stage="killed", until=now + SECONDS_TO_KILL)
    return to(state, killed, do.KillTrainer(state.ledger.attempt))


def after_exit(policy: Policy, state: State, phase: Running, event: on.TrainerExited, now: float) -> Step:
    """The trainer ended although nobody asked it to."""
    verdict = judge(policy, event)
    if verdict.rule == "succeed":
        return flush_success(policy, state, now, note=True)
    if verdict.rule == "fail":
        return flush(policy, state, Leave(Ending("failed", TRAINER_FAILED, verdict.reason)), now)
    ledger = count_load_failure(state.ledger, phase, event, now)
    state = replace(state, ledger=replace(ledger, crashes=ledger.crashes + 1))
    return restart(policy, state, phase, Restart(verdict.reason), now)


def count_load_failure(ledger: Ledger, phase: Running, event: on.TrainerExited, now: float) -> Ledger:
    """An end that nobody asked for counts against the checkpoint when it came right after resuming from it."""
    resumed, reached = ledger.resumed, ledger.reached
    if resumed is None or event.code == 0 or event.code in FOREIGN_KILLS or ran_out_of_disk(event):
        return ledger
    went_on = reached is not None and reached.step > resumed.step
    saved = any(place(checkpoint) > place(resumed) for checkpoint in usable(ledger))
    if went_on or saved or now - phase.since > LONGEST_LOAD:
        return ledger
    counts = dict(ledger.load_failures)
    counts[resumed.signature] = counts.get(resumed.signature, 0) + 1
    return replace(ledger, load_failures=tuple(counts.items()))


def after_stop(policy: Policy, state: State, phase: Stopping, event: on.TrainerExited, now: float) -> Step:
    """The trainer ended because it was told to."""
    state = replace(state, ledger=replace(state.ledger, last_stop=explain_stop(phase.aim, event.code)))
    match phase.aim:
        case Restart(hung=True) as aim:
            return restart(policy, state, phase.running, aim, now)
        case Restart():
            return begin_attempt(state, now)
        case aim:
            return flush(policy, state, aim, now, hurried=phase.hurried)


def explain_stop(aim: Leave | Hold | Restart, code: int) -> LastStop:
    match aim:
        case Leave(ending):
            return LastStop("preempted" if ending.outcome == "preempted" else "stopped", ending.reason, code)
        case Hold(reason=reason):
            return LastStop("preempted", reason, code)
        case Restart(reason=reason, hung=hung):
            return LastStop("hung" if hung else "stopped", reason, code)


def restart(policy: Policy, state: State, running: Running, why: Restart, now: float) -> Step:
    """Try again, unless too many attempts in a row have added no checkpoint."""
    ledger = set_aside_unloadable(state.ledger)
    fruitless = 0 if newest_step(ledger) > running.newest_before else ledger.fruitless + 1
    state = replace(state, ledger=replace(ledger, fruitless=fruitless))
    if fruitless >= policy.max_without_progress:
        return flush(policy, state, Leave(gave_up(fruitless, why)), now)
    wait = backoff(policy, fruitless)
    if wait == 0.0:
        return begin_attempt(state, now)
    return to(state, BackingOff(now + wait, why.reason))


def gave_up(fruitless: int, why: Restart) -> Ending:
    reason = f"{fruitless} attempt(s) in a row added no checkpoint; the last one: {why.reason}"
    hint = "the last lines of output tell more: cloudrun logs JOB; restart.max_without_progress sets the limit"
    return Ending("stalled", STALLED, reason, hint) if why.hung else Ending("failed", TRAINER_FAILED, reason, hint)


def set_aside_unloadable(ledger: Ledger) -> Ledger:
    """A checkpoint that fails to load twice is set aside, wherever its copies are."""
    failed = {signature: count for signature, count in ledger.load_failures if count >= LOAD_FAILURES_ALLOWED}
    for checkpoint in usable(ledger):
        if checkpoint.signature in failed:
            reason = f"the trainer died {failed[checkpoint.signature]} times right after resuming from it"
            ledger = reject(ledger, checkpoint.id, reason, checkpoint.signature)
    return ledger


# -- the way out -------------------------------------------------------------------------------------------------------


def flush_success(policy: Policy, state: State, now: float, *, note: bool = False) -> Step:
    """Training is done; the job is when nothing is owed."""
    state = replace(state, ledger=replace(try_again(state.ledger), trained=True))
    ending = Ending("succeeded", SUCCEEDED, "the trainer finished")
    phase = Flushing(Leave(ending), now, now + policy.give_up_storing)
    last = next((checkpoint.signature for checkpoint in usable(state.ledger)), None)
    return to(state, phase, *((do.NoteTrained(last),) if note else ()))


def flush(policy: Policy, state: State, aim: Leave | Hold, now: float, *, hurried: bool = False) -> Step:
    otherwise = aim.ending if isinstance(aim, Leave) else Ending("preempted", PREEMPTED, aim.reason)
    give_up_at = now if hurried else now + policy.grace
    state = replace(state, ledger=try_again(state.ledger))
    return to(state, Flushing(aim, now, give_up_at, otherwise, hurried))


def try_again(ledger: Ledger) -> Ledger:
    """Whatever went wrong with uploads before, the last one gets a try at once."""
    return replace(ledger, uploads=replace(ledger.uploads, retry_at=0.0, hopeless=False))


def finish(state: State, ending: Ending) -> Step:
    return to(state, Finished(ending))


def not_stored(ledger: Ledger) -> Ending:
    missing = owed(ledger)
    what = f"the last checkpoint (step {missing.step})" if missing else "the mark of completion"
    return Ending(
        "failed",
        NOT_STORED,
        f"training is finished, but {what} could not be stored: {ledger.uploads.problem or 'no answer'}",
        "everything is kept on this disk; the same command, here, stores it without training again",
    )


# -- settle ------------------------------------------------------------------------------------------------------------


def settle(policy: Policy, state: State, now: float) -> Step:
    """What follows from the state alone."""
    state, asks = settle_saves(state, now)
    state, uploads = settle_upload(policy, state, now)
    state, prunes = settle_retention(policy, state)
    state, ends = settle_flush(state, now)
    state, releases = settle_lease(state)
    state, warnings = settle_alarms(state, now)
    return state, asks + uploads + prunes + ends + releases + warnings


def settle_saves(state: State, now: float) -> Step:
    """Ask for a save when it is time, one at a time."""
    ask = cadence.next_ask(state)
    if now < ask.at:
        return state, ()
    saves = replace(state.ledger.saves, asked_at=now)
    state = replace(state, ledger=replace(state.ledger, saves=saves))
    return state, (do.AskSave(state.ledger.attempt, ask.reason, ask.deadline),)


def settle_alarms(state: State, now: float) -> Step:
    """What is wrong is told when it begins."""
    found, raised = alarms(state, now), {alarm.kind for alarm in state.ledger.alarms}
    news = tuple(do.Warn(alarm) for alarm in found if alarm.kind not in raised)
    return replace(state, ledger=replace(state.ledger, alarms=found)), news


def upload_due_at(policy: Policy, state: State) -> float:
    """When the next upload should start; infinity when none is owed, one runs, or this is no time for one."""
    uploads, due = state.ledger.uploads, owed(state.ledger)
    if uploads.current is not None or due is None or not may_write(state.ledger):
        return math.inf
    match state.phase:
        case Waiting() | Finished() | Stopping(saved=False) | Stopping(hurried=True) | Flushing(hurried=True):
            return math.inf
        case Running():
            return cadence.next_upload(policy, state.ledger, due)
        case _:
            return uploads.retry_at


def settle_upload(policy: Policy, state: State, now: float) -> Step:
    due = owed(state.ledger)
    if due is None or now < upload_due_at(policy, state):
        return state, ()
    uploads = replace(state.ledger.uploads, current=due, last_at=now)
    return replace(state, ledger=replace(state.ledger, uploads=uploads)), (do.Upload(due),)


def settle_retention(policy: Policy, state: State) -> Step:
    """Prune after a newer checkpoint has been committed, one prune at a time. What fails waits for the next commit."""
    ledger = state.ledger
    if not ledger.prune_due or ledger.pruning or isinstance(state.phase, Finished) or not may_write(ledger):
        return state, ()
    state = replace(state, ledger=replace(ledger, prune_due=False))
    verdicts = retain(
        ledger.stored,
        last=policy.keep.last,
        every_steps=policy.keep.every_steps,
        every_seconds=policy.keep.every_seconds,
        best=policy.keep.best,
        rejected=unusable_ids(ledger),
        in_use=in_use(state),
    )
    going = tuple((verdict.id, verdict.reason) for verdict in verdicts if not verdict.keep)
    if not going or newest_stored(ledger) is None:
        return state, ()
    ledger = replace(state.ledger, pruning=tuple(id_ for id_, _ in going))
    return replace(state, ledger=ledger), (do.Prune(going),)


def unusable_ids(ledger: Ledger) -> frozenset[str]:
    """The stored checkpoints that something speaks against, be it their own id or a copy of theirs."""
    return frozenset({one.id for one in ledger.stored} - {one.id for one in good(ledger.stored, ledger.rejected)})


def in_use(state: State) -> str | None:
    """The stored checkpoint that is being restored or was resumed from."""
    if isinstance(state.phase, Preparing) and state.phase.restoring is not None:
        return state.phase.restoring.id
    return state.ledger.resumed.id if state.ledger.resumed is not None else None


def mark_due_at(state: State) -> float:
    """When to write the mark of completion; infinity while something else is owed."""
    ledger = state.ledger
    wants_mark = isinstance(state.phase, Flushing) and is_success(state.phase.aim)
    busy = ledger.marking or ledger.done or owed(ledger) or ledger.uploads.current
    if not wants_mark or busy or not may_write(ledger):
        return math.inf
    return ledger.uploads.retry_at


def settle_lease(state: State) -> Step:
    """A machine that only waits for its end lets another one begin, as soon as it has nothing more to write."""
    ledger = state.ledger
    if not isinstance(state.phase, Holding) or ledger.lease is None or not ledger.lease.ours:
        return state, ()
    if owed(ledger) or is_busy(ledger) or ledger.pruning:
        return state, ()
    ledger = replace(ledger, lease=replace(ledger.lease, ours=False))
    return replace(state, ledger=ledger), (do.ReleaseLease(),)


def is_success(aim: Leave | Hold) -> bool:
    return isinstance(aim, Leave) and aim.ending.outcome == "succeeded"


def settle_flush(state: State, now: float) -> Step:
    """Leave when nothing is owed, or when trying on is senseless."""
    phase, ledger = state.phase, state.ledger
    if not isinstance(phase, Flushing):
        return state, ()
    if now >= mark_due_at(state) and not ledger.uploads.hopeless:
        return replace(state, ledger=replace(ledger, marking=True)), (do.MarkDone(),)
    clear = owed(ledger) is None and ledger.uploads.current is None
    if clear and not ledger.marking and (ledger.done or not is_success(phase.aim)):
        return settled(state, phase)
    late = now >= phase.give_up_at
    if (phase.hurried and late) or (not is_busy(ledger) and (ledger.uploads.hopeless or late)):
        return given_up(state, phase)
    return state, ()


def is_busy(ledger: Ledger) -> bool:
    """True while something is on its way to the store."""
    return ledger.uploads.current is not None or ledger.marking


def settled(state: State, phase: Flushing) -> Step:
    if isinstance(phase.aim, Hold):
        return to(state, Holding(phase.aim))
    return finish(state, phase.aim.ending)


def given_up(state: State, phase: Flushing) -> Step:
    if isinstance(phase.aim, Hold):
        return to(state, Holding(phase.aim))
    return finish(state, phase.otherwise or not_stored(state.ledger))


def to(state: State, phase: Phase, *actions: Action) -> Step:
    return to_phase(state, phase), actions


def to_phase(state: State, phase: Phase) -> State:
    return replace(state, phase=phase)


def time_before(state: State, deadline: float, now: float) -> float:
    return seconds_to_save(deadline - now, state.ledger.uploads.seconds)
