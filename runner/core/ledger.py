"""The journal read back: how a run has spent its time and money, and where it stands.

``fold`` takes one line at a time, so a supervisor keeps its account as it goes and a reader of stored journals gets the
same account from the same lines. Nothing else counts anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from runner.core.hazard import no_lives, with_life
from runner.core.record import Line
from runner.core.state import NO_HISTORY, Band, History, Trend

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Session:
    """One life of a supervisor, from its first line to its last.

    id       of the session; empty where its first line does not say
    provider, age   of the machine when the session began, as :class:`runner.core.events.Started` has them
    useful   seconds of training that were kept, in attempts that are over
    """

    host: str
    since: float
    until: float
    per_hour: float | None
    on_demand_per_hour: float | None
    currency: str
    monitors: tuple[str, ...] = ()
    id: str = ""
    provider: str = ""
    age: float = 0.0
    useful: float = 0.0
    phase: str = "waiting"
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the trainer.

    began      when it first reported a step, or started where it never did
    saved_at   when it last completed a checkpoint
    ended_at   when it ended; None while it runs, and for ever where its supervisor vanished with it
    session    the number of the supervisor's session that it belongs to
    """

    attempt: int
    began: float
    session: int
    stepping: bool = False
    saved_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What the lines so far amount to.

    safe_at   what was trained until then is in the store
    """

    sessions: tuple[Session, ...] = ()
    life: Life | None = None
    starts: int = 0
    state: Line = field(default_factory=dict)
    reached: Line | None = None
    safe_at: float = 0.0


def fold(account: Account, line: Line) -> Account:
    """The account with one more line. Lines of one run come in order; one of an unknown shape counts for nothing."""
    try:
        return fold_line(account, line, float(line["at"]), line["event"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return account


def fold_line(account: Account, line: Line, at: float, event: Line) -> Account:
    if account.sessions and account.sessions[-1].outcome == "succeeded":
        return account  # whoever submits a finished run once more learns that, and changes nothing of its record
    if event["type"] == "Started":
        account = replace(account, sessions=(*account.sessions, open_session(event, at)))
    if not account.sessions:
        return account
    account = fold_event(account, event, at)
    session = account.sessions[-1]
    return in_session(fold_state(account, line.get("state")), -1, until=max(session.until, at))


def open_session(event: Line, at: float) -> Session:
    return Session(
        host=event.get("host", ""),
        since=at,
        until=at,
        per_hour=event.get("per_hour"),
        on_demand_per_hour=event.get("on_demand_per_hour"),
        currency=event.get("currency", "USD"),
        monitors=tuple(event.get("monitors", ())),
        id=event.get("session", ""),
        provider=event.get("provider", ""),
        age=event.get("age", 0.0),
    )


def in_session(account: Account, number: int, **changes: Any) -> Account:
    """The account with changes in one session."""
    sessions = list(account.sessions)
    sessions[number] = replace(sessions[number], **changes)
    return replace(account, sessions=tuple(sessions))


def fold_event(account: Account, event: Line, at: float) -> Account:
    kind, life = event["type"], account.life
    if kind == "TrainerStarted":
        life = Life(event["attempt"], at, len(account.sessions) - 1)
        return replace(account, life=life, starts=account.starts + 1, reached=None)
    if kind == "Uploaded":
        return replace(account, safe_at=max(account.safe_at, saved_when(account, event, at)))
    if life is None or life.ended_at is not None:
        return account
    if kind == "Recovered":
        return fold_vanished(account, life, event)
    return fold_trainer(account, life, event, at) if event.get("attempt") == life.attempt else account


def saved_when(account: Account, event: Line, at: float) -> float:
    """When the checkpoint that is stored now was complete on the disk."""
    local = account.state.get("ledger", {}).get("local", ())
    times = [one["time"] for one in local if one["signature"] == event["checkpoint"]["signature"]]
    return float(min([at - event["seconds"], *times]))


def fold_trainer(account: Account, life: Life, event: Line, at: float) -> Account:
    kind = event["type"]
    if kind == "Progressed":
        began = life.began if life.stepping else at
        return replace(account, life=replace(life, began=began, stepping=True), reached=event)
    if kind == "CheckpointSaved":
        return replace(account, life=replace(life, saved_at=at))
    if kind == "TrainerExited":
        kept_until = at if event["code"] == 0 else life.saved_at
        return end_life(account, life, at, kept_until)
    return account


def fold_vanished(account: Account, life: Life, event: Line) -> Account:
    """The supervisor vanished, and its trainer with it: kept is what the store has, or this disk."""
    end = account.sessions[life.session].until
    here = [one["time"] for one in event["local"] if life.began < one["time"] <= end]
    return end_life(account, life, end, max([account.safe_at, *here]))


def end_life(account: Account, life: Life, at: float, kept_until: float | None) -> Account:
    useful = account.sessions[life.session].useful + max((kept_until or 0.0) - life.began, 0.0)
    return replace(in_session(account, life.session, useful=useful), life=replace(life, ended_at=at))


def fold_state(account: Account, state: Line | None) -> Account:
    if state is None:
        return account
    outcome = state["details"]["ending"]["outcome"] if state["phase"] == "finished" else None
    return replace(in_session(account, -1, phase=state["phase"], outcome=outcome), state=state)


# -- what it amounts to ------------------------------------------------------------------------------------------------


def preemptions(account: Account) -> int:
    """Sessions that were taken away: those that said so, and earlier ones that never got to say anything."""
    earlier = sum(session.outcome is None for session in account.sessions[:-1])
    return earlier + sum(session.outcome == "preempted" for session in account.sessions)


def history(account: Account, provider: str) -> History:
    """What the lines teach a supervisor that begins now, on a machine of this provider."""
    try:
        learned = learned_from(account.state.get("ledger", {}))
    except (AttributeError, KeyError, TypeError, ValueError):
        learned = NO_HISTORY
    return replace(learned, lives=lives(account, provider))


def lives(account: Account, provider: str) -> tuple[Band, ...]:
    """How long machines of the provider lived. A session that nobody ended on purpose is one that was taken away."""
    bands = no_lives()
    for session in account.sessions:
        if session.provider == provider:
            lost = session.outcome in (None, "preempted")
            bands = with_life(bands, session.age, session.age + max(session.until - session.since, 0.0), lost=lost)
    return bands


def learned_from(ledger: Line) -> History:
    """What a ledger, as lines hold it, knows of saves and losses. Lines of older versions know nothing of them."""
    saves, losses = ledger.get("saves"), ledger.get("losses")
    if not saves or not losses:
        return NO_HISTORY
    trend = losses["recent"]
    return History(
        cost=saves["cost"],
        persist=float(saves["persist"]),
        upload=float(ledger["uploads"]["seconds"]),
        losses=Trend(int(trend["count"]), float(trend["mean"]), float(trend["variance"])),
    )


def seconds_of(account: Account, now: float, *, alive: bool) -> list[float]:
    """How long each session has lived. The last one lives until now, if it lives; else until its last line."""
    ends = [session.until for session in account.sessions]
    if alive and ends:
        ends[-1] = max(ends[-1], now)
    return [end - session.since for session, end in zip(account.sessions, ends, strict=True)]


def useful_seconds(account: Account, now: float, *, alive: bool) -> float:
    """Training time that is kept, counting what runs now as kept; of a trainer that vanished, what is stored."""
    done = sum(session.useful for session in account.sessions)
    life = account.life
    if life is None or life.ended_at is not None:
        return done
    return done + max((now if alive else account.safe_at) - life.began, 0.0)


def goodput(account: Account, now: float, *, alive: bool) -> float | None:
    """Useful over paid time, 0 to 1; None before anything was paid."""
    paid = sum(seconds_of(account, now, alive=alive))
    return min(useful_seconds(account, now, alive=alive) / paid, 1.0) if paid > 0 else None


def cost(account: Account, now: float, *, alive: bool) -> Line:
    """Money spent, and saved against on-demand machines; None where a price is unknown (never 0)."""
    hours = [seconds / HOUR for seconds in seconds_of(account, now, alive=alive)]
    spent = total(hours, [session.per_hour for session in account.sessions])
    full = total(hours, [session.on_demand_per_hour for session in account.sessions])
    saved = full - spent if full is not None and spent is not None else None
    return {"spent": spent, "saved": saved, "currency": account.sessions[-1].currency if spent is not None else None}


def total(hours: list[float], prices: list[float | None]) -> float | None:
    """The sum of hours times prices; None when one price is unknown, or there is nothing to add."""
    known = [price for price in prices if price is not None]
    if not known or len(known) < len(prices):
        return None
    return sum(count * price for count, price in zip(hours, known, strict=True))


def status(job: str, account: Account, now: float, *, alive: bool) -> dict[str, Any]:
    """The machine-readable status of a job, as ``cloudrun status --json`` prints it."""
    state = account.state
    ledger: Line = state.get("ledger", {})
    ending = state["details"]["ending"] if state.get("phase") == "finished" else {}
    session = account.sessions[-1] if account.sessions else None
    reached = account.reached or {}
    resumed = ledger.get("resumed")
    return {
        "job": job,
        "run": ledger.get("run") or None,
        "phase": state.get("phase", "waiting"),
        "outcome": ending.get("outcome"),
        "exit_code": ending.get("exit_code"),
        "reason": ending.get("reason") or waiting_for(state),
        "hint": ending.get("hint") or None,
        "attempt": ledger.get("attempt") or None,
        "host": session.host if session else None,
        "alive": alive,
        "lease": None if ending else lease_status(ledger.get("lease")),
        "heard_at": session.until if session else None,
        "step": reached["step"] if reached else resumed["step"] if resumed else None,
        "total": reached.get("total"),
        "rate": reached.get("rate"),
        "eta_s": eta(reached),
        "cadence": None if ending else named(ledger.get("cadence"), "save_every", "upload_every", "reason"),
        "checkpoint": checkpoint_status(account, now, alive=alive),
        "resumed_from": named(resumed, "step", "attempt", "id"),
        "rejected": [named(one, "id", "step", "reason") for one in ledger.get("rejected", ())],
        "restarts": {
            "total": max(account.starts - 1, 0),
            "fruitless": ledger.get("fruitless", 0),
            "preemptions": preemptions(account),
        },
        "last_stop": named(ledger.get("last_stop"), "cause", "reason", "code"),
        "goodput": goodput(account, now, alive=alive),
        "cost": cost(account, now, alive=alive),
        "monitors": [{"name": name, "sees": None, "detail": None} for name in (session.monitors if session else ())],
        "warnings": warnings(ledger),
    }


def waiting_for(state: Line) -> str | None:
    """Why a supervisor stands by."""
    return state["details"].get("reason") or None if state.get("phase") == "waiting" else None


def lease_status(lease: Line | None) -> Line | None:
    """Who held the lease when the last line was written; None where there was none."""
    if not lease or not lease.get("epoch") or not lease.get("ours"):
        return None
    return {key: lease[key] for key in ("holder", "host", "epoch", "standby")}


def named(line: Line | None, *keys: str) -> dict[str, Any] | None:
    return None if line is None else {key: line.get(key) for key in keys}


def eta(reached: Line) -> float | None:
    """Seconds to the end, where the total and the rate are known."""
    total, rate = reached.get("total"), reached.get("rate")
    return max(total - reached["step"], 0) / rate if total and rate else None


def checkpoint_status(account: Account, now: float, *, alive: bool) -> dict[str, Any]:
    """The newest stored checkpoint, what is on its way, and the work that would be lost with the machine now."""
    ledger = account.state.get("ledger", {})
    newest = newest_good(ledger, "stored")
    local = newest_good(ledger, "local")
    owed = local if local is not None and (newest is None or age(local) > age(newest)) else None
    risk = seconds_at_risk(account, now, alive=alive, owed=owed is not None)
    price = account.sessions[-1].per_hour if account.sessions else None
    return {
        "step": newest["step"] if newest else None,
        "committed_at": newest["time"] if newest else None,
        "age_s": now - newest["time"] if newest else None,
        "lag_bytes": owed["bytes"] if owed else 0,
        "at_risk_s": risk,
        "at_risk_cost": risk / HOUR * price if price is not None else None,
    }


def newest_good(ledger: Line, where: str) -> Line | None:
    """As :func:`runner.core.state.good` has it: nothing speaks against it or a copy of it."""
    rejected = ledger.get("rejected", ())
    bad = {one["id"] for one in rejected} | {one.get("signature") for one in rejected}
    return max((one for one in ledger.get(where, ()) if not {one["id"], one["signature"]} & bad), key=age, default=None)


def age(checkpoint: Line) -> tuple[int, int, float]:
    """The order of checkpoints, as in :func:`runner.core.state.age`."""
    return checkpoint.get("epoch", 0), checkpoint["step"], checkpoint["time"]


def seconds_at_risk(account: Account, now: float, *, alive: bool, owed: bool) -> float:
    """Training time that the store does not have yet: of the trainer that runs, or ended with something ``owed``."""
    life = account.life
    if life is None or (life.ended_at is not None and not owed) or (life.ended_at is None and not alive):
        return 0.0
    end = now if life.ended_at is None else life.ended_at
    return max(end - max(life.began, account.safe_at), 0.0)


def warnings(ledger: Line) -> list[str]:
    """What a person should look at."""
    found = [alarm["text"] for alarm in ledger.get("alarms", ())]
    if ledger.get("started_over") and ledger.get("resumed"):
        found.append(
            f"the trainer was given the checkpoint of step {ledger['resumed']['step']} and started before it; "
            "what is stored is kept"
        )
    problem = ledger.get("uploads", {}).get("problem")
    if problem and ledger.get("uploads", {}).get("failures"):
        found.append(f"the last {ledger['uploads']['failures']} upload(s) failed: {problem}")
    if ledger.get("trained") and not ledger.get("stored") and not ledger.get("local"):
        found.append("no checkpoint was ever seen in CLOUDRUN_CHECKPOINT_DIR, or where checkpoints.dir says")
    return found
