"""What a person should look at while the job goes on: found in the state alone, raised once, gone when it is over."""

from __future__ import annotations

import math
from dataclasses import fields, replace

from runner.core.cadence import LONGEST, words
from runner.core.state import Alarm, Environment, Ledger, Losses, Running, State, Trend, newest_stored, owed

INTERVALS = 3.0
# Whatever the intervals, a silence shorter than this is no news.
LEAST_SILENCE = 300.0

SIGMAS = 5.0
# A sigma is at least this share of the mean: very smooth losses must not make a jump of every breath.
LEAST_SIGMA = 0.01
ENOUGH_BEFORE = 8
FIRST_LOSSES = 3
MEMORY = 16

NAMES = {"world": "number of ranks", "threads": "number of threads", "cpu": "CPU instruction set"}


# -- alarms ------------------------------------------------------------------------------------------------------------


def alarms(state: State, now: float) -> tuple[Alarm, ...]:
    """What is wrong now. Between two attempts: what was wrong in the last one."""
    if not isinstance(state.phase, Running):
        return state.ledger.alarms
    found = (
        no_checkpoint(state, now),
        not_stored(state, now),
        loss_jumped(state.ledger),
        environment_changed(state.ledger),
    )
    return tuple(alarm for alarm in found if alarm is not None)


def alarm_at(state: State) -> float:
    """When silence will be an alarm that it is not yet, in epoch seconds; infinity when only an event can raise one."""
    raised = {alarm.kind for alarm in state.ledger.alarms}
    due = {"no checkpoint": no_checkpoint_at(state), "not stored": not_stored_at(state)}
    return min((at for kind, at in due.items() if kind not in raised), default=math.inf)


def no_checkpoint(state: State, now: float) -> Alarm | None:
    since = silent_since(state)
    if since is None or now < no_checkpoint_at(state):
        return None
    what = "new checkpoint" if state.ledger.saves.last_at is not None else "checkpoint"
    text = f"no complete {what} for {words(now - since)}: does the trainer hang, or may it not write?"
    return Alarm("no checkpoint", text)


def no_checkpoint_at(state: State) -> float:
    since = silent_since(state)
    if since is None:
        return math.inf
    saves, cadence = state.ledger.saves, state.ledger.cadence
    is_asked = saves.askable and saves.since is not None
    every = cadence.save_every if cadence is not None and is_asked else LONGEST
    return since + max(INTERVALS * max(every, saves.own_every or 0.0), LEAST_SILENCE)


def silent_since(state: State) -> float | None:
    """When the trainer last completed a checkpoint, or else made its first step, or was started; None: none runs."""
    saves = state.ledger.saves
    return (saves.last_at or saves.since or state.phase.since) if isinstance(state.phase, Running) else None


def not_stored(state: State, now: float) -> Alarm | None:
    if now < not_stored_at(state):
        return None
    problem = state.ledger.uploads.problem
    why = f": {problem}" if problem else ""
    return Alarm("not stored", f"no checkpoint was stored for {words(now - stored_when(state))}{why}")


def not_stored_at(state: State) -> float:
    """Three times what an upload may wait and take after the last commit, as long as something is owed."""
    ledger = state.ledger
    if not isinstance(state.phase, Running) or owed(ledger) is None or ledger.saves.since is None:
        return math.inf
    every = ledger.cadence.upload_every if ledger.cadence is not None else LONGEST
    # The first upload may take long: nobody knows yet.
    usual = max(every, ledger.saves.own_every or 0.0) + (ledger.uploads.seconds or LONGEST)
    return stored_when(state) + max(INTERVALS * usual, LEAST_SILENCE)


def stored_when(state: State) -> float:
    """When a checkpoint was last stored, or else the trainer made its first step."""
    ledger = state.ledger
    last = newest_stored(ledger)
    return max(last.time if last is not None else 0.0, ledger.saves.since or 0.0)


# -- the loss after a resume -------------------------------------------------------------------------------------------


def loss_jumped(ledger: Ledger) -> Alarm | None:
    before, first = ledger.losses.before, ledger.losses.first
    if len(first) < FIRST_LOSSES or before.count < ENOUGH_BEFORE or ledger.resumed is None:
        return None
    mean = sum(first) / len(first)
    sigma = max(math.sqrt(before.variance), LEAST_SIGMA * abs(before.mean))
    if math.isfinite(mean) and abs(mean - before.mean) <= SIGMAS * sigma:
        return None
    text = f"the loss is {mean:.4g} after resuming from step {ledger.resumed.step}, and was {before.mean:.4g} before"
    return Alarm("loss", f"{text}: is the whole state restored?")


def with_loss(losses: Losses, loss: float) -> Losses:
    first = losses.first if len(losses.first) >= FIRST_LOSSES else (*losses.first, loss)
    return replace(losses, first=first, recent=followed(losses.recent, loss))


def resumed(losses: Losses) -> Losses:
    """At the start of an attempt. One that reported next to nothing does not wipe out what was known before it."""
    enough = losses.recent.count >= ENOUGH_BEFORE
    return Losses(before=losses.recent if enough else losses.before)


def followed(trend: Trend, figure: float) -> Trend:
    """The trend with one more figure; what is no number does not count."""
    if not math.isfinite(figure):
        return trend
    weight = max(1.0 / MEMORY, 1.0 / (trend.count + 1))
    distance = figure - trend.mean
    variance = (1.0 - weight) * (trend.variance + weight * distance * distance)
    return Trend(trend.count + 1, trend.mean + weight * distance, variance)


# -- the environment ---------------------------------------------------------------------------------------------------


def environment_changed(ledger: Ledger) -> Alarm | None:
    """What differs from the run that made the checkpoint: it goes on, but not bit for bit."""
    made = ledger.resumed.environment if ledger.resumed is not None else None
    if made is None or ledger.environment is None:
        return None
    changes = differences(made, ledger.environment)
    return Alarm("environment", f"{'; '.join(changes)}: training is not exact any more") if changes else None


def differences(before: Environment, now: Environment) -> tuple[str, ...]:
    """In words, where both are known and not equal."""
    pairs = ((field.name, getattr(before, field.name), getattr(now, field.name)) for field in fields(Environment))
    return tuple(
        f"the {NAMES[name]} was {old} and is {new}"
        for name, old, new in pairs
        if old is not None and new is not None and old != new
    )
