"""When to save and when to upload: what a save costs, weighed against what is at risk without it.

The rule of the square root: where a save costs ``c`` seconds and machines live ``m`` seconds on average, an interval of
sqrt(2 c m) loses least. It is bounded: an upload must come through between two saves, saves must not eat the training,
and nobody wants to lose more than a quarter of an hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from runner.core import events as on
from runner.core.events import Event
from runner.core.hazard import losses_seen, mean_life, with_life
from runner.core.policy import Policy
from runner.core.state import Band, Cadence, Checkpoint, Deadline, Ledger, Running, Saves, State

SHORTEST = 10.0
LONGEST = 900.0
# Saves may take a tenth of the training at most, whatever the machine's prospects.
LARGEST_SHARE = 0.1
# Before a save was measured. The first one comes early: it shows that saving works, and what it costs.
FIRST_SAVE = 60.0
LIKELY_COST = 1.0
# How much a new measurement says against the earlier ones.
NEWS = 0.3
# A trainer that does not answer is asked again, after so many intervals and a minute at least.
PATIENCE = 3.0
LEAST_PATIENCE = 60.0
# What comes between a save and a deadline takes longer than it last did.
SLACK = 1.5
RESERVE = 30.0


# -- the verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prospects:
    """What the weighing knows, all in seconds: the cost of a save (None: unknown), the upload, the mean life."""

    cost: float | None
    upload: float
    life: float
    losses: int


def weigh(policy: Policy, known: Prospects) -> Cadence:
    """How often to save and to upload. An interval that the owner gave is obeyed."""
    if policy.upload_every is not None:
        every = policy.upload_every
        return Cadence(max(every, 1.0), every, f"every {words(every)}, as the job spec says")
    if known.cost is None:
        why = f"the first after {words(FIRST_SAVE)}, to see that it works and what it costs"
        return Cadence(FIRST_SAVE, uploads_apart(known), why)
    best = math.sqrt(2.0 * known.cost * known.life)
    floor = max(SHORTEST, known.upload, known.cost / LARGEST_SHARE)
    every = min(max(rounded(best), floor), max(LONGEST, known.upload))
    return Cadence(every, uploads_apart(known), f"every {words(every)}: {reason(known, best, floor)}")


def uploads_apart(known: Prospects) -> float:
    """A save goes out as soon as it is there, but the way to the store is not kept busy for ever."""
    return max(SHORTEST, known.upload)


def reason(known: Prospects, best: float, floor: float) -> str:
    seen = f"{known.losses} seen lost" if known.losses else "a guess, none seen lost yet"
    weighed = f"a save costs {words(known.cost or 0.0)}, a machine like this one lives {words(known.life)} ({seen})"
    if best < floor == known.upload:
        return f"{weighed}; not sooner than an upload, which takes {words(known.upload)}"
    if best < floor:
        return f"{weighed}; not sooner, so that saves stay cheap"
    return f"{weighed}; never later" if best > LONGEST else weighed


def rounded(seconds: float) -> float:
    """To about a twentieth: nobody can tell the difference, and people can read it."""
    grain = 1.0 if seconds < 60.0 else 5.0 if seconds < 300.0 else 30.0
    return round(seconds / grain) * grain


def words(seconds: float) -> str:
    """A length of time for people."""
    if seconds < 10.0:
        return f"{seconds:.2g} s"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"


# -- what it is weighed from -------------------------------------------------------------------------------------------


def paced(policy: Policy, ledger: Ledger, event: Event, now: float) -> Ledger:
    """The ledger with the cadence weighed anew, when the event tells something that it depends on."""
    tells = isinstance(event, on.Recovered | on.TrainerStarted | on.CheckpointSaved | on.Uploaded)
    if not tells:
        return ledger
    known = Prospects(ledger.saves.cost, ledger.uploads.seconds, life_expected(policy, ledger, now), losses(ledger))
    return replace(ledger, cadence=weigh(policy, known))


def life_expected(policy: Policy, ledger: Ledger, now: float) -> float:
    """Seconds until the machine or the trainer may be expected to die: their rates add up."""
    lives = lives_until(ledger, now)
    watched = sum(band.seconds for band in lives)
    crashes = ledger.crashes / (policy.mean_life + watched)
    return 1.0 / (1.0 / mean_life(lives, age(ledger, now), policy.mean_life) + crashes)


def lives_until(ledger: Ledger, now: float) -> tuple[Band, ...]:
    """The lives that are known, with the present machine's, which is not over."""
    return with_life(ledger.history.lives, ledger.machine.age, age(ledger, now), lost=False)


def age(ledger: Ledger, now: float) -> float:
    """Of this machine, in seconds."""
    return ledger.machine.age + max(now - ledger.machine.since, 0.0)


def losses(ledger: Ledger) -> int:
    return losses_seen(ledger.history.lives) + ledger.crashes


# -- saves, as they come -----------------------------------------------------------------------------------------------


def joined(saves: Saves) -> Saves:
    return replace(saves, askable=True)


def stepped(saves: Saves, now: float) -> Saves:
    return saves if saves.since is not None else replace(saves, since=now)


def saved(saves: Saves, event: on.CheckpointSaved, now: float) -> Saves:
    """A checkpoint is complete. Where nobody measured its cost, the time from the asking on is an upper bound of it."""
    asked = saves.asked_at
    cost = None if event.stall is None else event.stall + (event.slowdown or 0.0)
    if cost is None and asked is not None:
        cost = now - asked
    took = event.persist + (event.stall or 0.0)
    return replace(
        saves,
        asked_at=None,
        begun_at=now - took if asked is None else asked,
        last_at=now,
        own_every=now - saves.last_at if saves.last_at is not None else saves.own_every,
        cost=saves.cost if cost is None else blended(saves.cost, cost),
        persist=blended(saves.persist, event.persist) if event.persist else saves.persist,
    )


def blended(before: float | None, news: float) -> float:
    return news if not before else (1.0 - NEWS) * before + NEWS * news


def next_attempt(saves: Saves) -> Saves:
    """What outlives an attempt is what was measured."""
    return Saves(cost=saves.cost, persist=saves.persist)


# -- when to ask, when to upload ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """When to ask the trainer for a save, and why."""

    at: float
    reason: str = ""
    deadline: float | None = None


NEVER = Ask(math.inf)


def next_ask(state: State) -> Ask:
    """The next time to ask for a save. Never, unless the trainer can be asked and has something to save."""
    saves, cadence = state.ledger.saves, state.ledger.cadence
    if not isinstance(state.phase, Running) or not saves.askable or saves.since is None or cadence is None:
        return NEVER
    if saves.asked_at is not None:
        patience = max(PATIENCE * cadence.save_every, LEAST_PATIENCE)
        return Ask(saves.asked_at + patience, "the last request was not answered")
    base = saves.since if saves.begun_at is None else saves.begun_at
    regular = Ask(base + cadence.save_every, cadence.reason)
    return min((regular, *asks_before_deadlines(state.ledger, base)), key=lambda ask: ask.at)


def asks_before_deadlines(ledger: Ledger, base: float) -> tuple[Ask, ...]:
    """One for each known deadline before which nothing has been saved yet that can still be stored in time."""
    due = ((last_moment(ledger, deadline), deadline) for deadline in ledger.deadlines)
    return tuple(Ask(at, f"before {deadline.reason}", deadline.at) for at, deadline in due if base < at)


def last_moment(ledger: Ledger, deadline: Deadline) -> float:
    """When a save must be asked for, so that it is stored before the deadline."""
    saves = ledger.saves
    return deadline.at - SLACK * ((saves.cost or LIKELY_COST) + saves.persist + ledger.uploads.seconds) - RESERVE


def next_upload(policy: Policy, ledger: Ledger, due: Checkpoint) -> float:
    """When a trainer that runs may have its checkpoint uploaded: at its time, or before a deadline at once."""
    if ledger.uploads.last_at is None:
        return ledger.uploads.retry_at
    every = ledger.cadence.upload_every if ledger.cadence else policy.upload_every or FIRST_SAVE
    moments = (last_moment(ledger, deadline) for deadline in ledger.deadlines)
    urgent = min((at for at in moments if at <= due.time), default=math.inf)
    return max(min(ledger.uploads.last_at + every, urgent), ledger.uploads.retry_at)


def with_deadline(deadlines: tuple[Deadline, ...], event: on.DeadlineKnown) -> tuple[Deadline, ...]:
    """The known deadlines, that of one source replaced, or forgotten."""
    others = tuple(one for one in deadlines if one.source != event.source)
    return others if event.at is None else (*others, Deadline(event.source, event.at, event.reason))
