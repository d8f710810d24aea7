"""The journal read back: how a run has spent its time and money, and where it stands.

``fold`` takes one line at a time, so a supervisor keeps its account as it goes and a reader of stored journals gets the
same account from the same lines. Nothing else counts anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from runner.core.record import Line

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Session:
    """One life of a supervisor, from its first line to its last.

    useful   seconds of training that were kept, in attempts that are over
    """

    host: str
    since: float
    until: float
    per_hour: float | None
    on_demand_per_hour: float | None
    currency: str
    monitors: tuple[str, ...] = ()
    useful: float = 0.0
    phase: str = "waiting"
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """The trainer's present or last life: what of it is kept so far.

    stepping_since   when it first reported a step, or started where it never did
    saved_at         when it last completed a checkpoint
    """

    attempt: int
    started_at: float
    stepping_since: float | None = None
    saved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What the lines so far amount to."""

    sessions: tuple[Session, ...] = ()
    life: Life | None = None
    starts: int = 0
    state: Line = field(default_factory=dict)
    reached: Line | None = None
    at: float = 0.0


def fold(account: Account, line: Line) -> Account:
    """The account with one more line. Lines of one run come in the order of their time."""
    at, event = float(line["at"]), line["event"]
    kind = event["type"]
    if kind == "Started":
        account = replace(account, sessions=(*account.sessions, open_session(event, at)), life=None)
    if not account.sessions:
        return account
    account = fold_trainer(account, event, kind, at)
    if "state" in line:
        account = fold_state(account, line["state"])
    session = replace(account.sessions[-1], until=at)
    return replace(account, sessions=(*account.sessions[:-1], session), at=at)


def open_session(event: Line, at: float) -> Session:
    return Session(
        host=event.get("host", ""),
        since=at,
        until=at,
        per_hour=event.get("per_hour"),
        on_demand_per_hour=event.get("on_demand_per_hour"),
        currency=event.get("currency", "USD"),
        monitors=tuple(event.get("monitors", ())),
    )


def fold_trainer(account: Account, event: Line, kind: str, at: float) -> Account:
    life = account.life
    if kind == "TrainerStarted":
        return replace(account, life=Life(event["attempt"], at), starts=account.starts + 1, reached=None)
    if life is None or event.get("attempt") != life.attempt:
        return account
    if kind == "Progressed":
        since = life.stepping_since if life.stepping_since is not None else at
        return replace(account, life=replace(life, stepping_since=since), reached={**event, "at": at})
    if kind == "CheckpointSaved":
        return replace(account, life=replace(life, saved_at=at))
    if kind == "TrainerExited":
        ended = replace(account.sessions[-1], useful=account.sessions[-1].useful + kept(life, event, at))
        return replace(
            account, sessions=(*account.sessions[:-1], ended), life=replace(life, stepping_since=at, saved_at=at)
        )
    return account


def kept(life: Life, event: Line, at: float) -> float:
    """Seconds of this life that nobody has to train again."""
    end = at if event["code"] == 0 else life.saved_at
    begin = life.stepping_since if life.stepping_since is not None else life.started_at
    return max(end - begin, 0.0) if end is not None else 0.0


def fold_state(account: Account, state: Line) -> Account:
    session = replace(account.sessions[-1], phase=state["phase"])
    if state["phase"] == "finished":
        session = replace(session, outcome=state["details"]["ending"]["outcome"])
    return replace(account, sessions=(*account.sessions[:-1], session), state=state)


# -- what it amounts to ------------------------------------------------------------------------------------------------


def preemptions(account: Account) -> int:
    """Sessions that were taken away: those that said so, and earlier ones that never got to say anything."""
    earlier = sum(session.outcome is None for session in account.sessions[:-1])
    return earlier + sum(session.outcome == "preempted" for session in account.sessions)


def useful_seconds(account: Account, now: float) -> float:
    """Training time that is kept, counting what runs now as kept."""
    done = sum(session.useful for session in account.sessions)
    life, phase = account.life, account.sessions[-1].phase if account.sessions else ""
    if life is None or life.stepping_since is None or phase not in ("running", "stopping"):
        return done
    return done + max(now - life.stepping_since, 0.0)


def paid_seconds(account: Account, now: float, *, alive: bool) -> float:
    """Time on machines. A session that lives is paid until now."""
    paid = sum(session.until - session.since for session in account.sessions)
    return paid + (max(now - account.at, 0.0) if alive and account.sessions else 0.0)


def goodput(account: Account, now: float, *, alive: bool) -> float | None:
    """Useful over paid time, 0 to 1; None before anything was paid."""
    paid = paid_seconds(account, now, alive=alive)
    return min(useful_seconds(account, now) / paid, 1.0) if paid > 0 else None


def cost(account: Account, now: float, *, alive: bool) -> Line:
    """Money spent, and saved against on-demand machines; None where a price is unknown (never 0)."""
    spent: float | None = 0.0
    full: float | None = 0.0
    for index, session in enumerate(account.sessions):
        last = index == len(account.sessions) - 1
        hours = ((max(now, session.until) if last and alive else session.until) - session.since) / HOUR
        spent = None if spent is None or session.per_hour is None else spent + hours * session.per_hour
        full = None if full is None or session.on_demand_per_hour is None else full + hours * session.on_demand_per_hour
    if not account.sessions:
        spent = full = None
    saved = full - spent if full is not None and spent is not None else None
    currency = account.sessions[-1].currency if account.sessions and spent is not None else None
    return {"spent": spent, "saved": saved, "currency": currency}


def status(job: str, account: Account, now: float, *, alive: bool) -> dict[str, Any]:
    """The machine-readable status of a job, as ``cloudrun status --json`` prints it."""
    state = account.state
    ledger: Line = state.get("ledger", {})
    ending = state["details"]["ending"] if state.get("phase") == "finished" else {}
    session = account.sessions[-1] if account.sessions else None
    reached = account.reached or {}
    price = session.per_hour if session else None
    return {
        "job": job,
        "run": ledger.get("run") or None,
        "phase": state.get("phase", "waiting"),
        "outcome": ending.get("outcome"),
        "exit_code": ending.get("exit_code"),
        "reason": ending.get("reason"),
        "hint": ending.get("hint") or None,
        "attempt": ledger.get("attempt") or None,
        "host": session.host if session else None,
        "alive": alive,
        "step": reached.get("step"),
        "total": reached.get("total"),
        "rate": reached.get("rate"),
        "eta_s": eta(reached),
        "checkpoint": checkpoint_status(account, now, price),
        "resumed_from": named(ledger.get("resumed"), "step", "attempt", "id"),
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


def named(line: Line | None, *keys: str) -> dict[str, Any] | None:
    return None if line is None else {key: line.get(key) for key in keys}


def eta(reached: Line) -> float | None:
    """Seconds to the end, where the total and the rate are known."""
    total, rate = reached.get("total"), reached.get("rate")
    return max(total - reached["step"], 0) / rate if total and rate else None


def checkpoint_status(account: Account, now: float, price: float | None) -> dict[str, Any]:
    """The newest stored checkpoint, what is on its way, and the work that would be lost with the machine now."""
    ledger = account.state.get("ledger", {})
    bad = {rejected["id"] for rejected in ledger.get("rejected", ())}
    stored = [one for one in ledger.get("stored", ()) if one["id"] not in bad]
    newest = max(stored, key=lambda one: (one["step"], one["time"]), default=None)
    risk = seconds_at_risk(account, newest, now)
    newest_order = (newest["step"], newest["time"]) if newest else (-1, 0.0)
    local = [
        one for one in ledger.get("local", ()) if (one["step"], one["time"]) > newest_order and one["id"] not in bad
    ]
    return {
        "step": newest["step"] if newest else None,
        "committed_at": newest["time"] if newest else None,
        "age_s": now - newest["time"] if newest else None,
        "lag_bytes": max(local, key=lambda one: (one["step"], one["time"]))["bytes"] if local else 0,
        "at_risk_s": risk,
        "at_risk_cost": risk / HOUR * price if price is not None else None,
    }


def seconds_at_risk(account: Account, newest: Line | None, now: float) -> float:
    """Training time since the newest stored checkpoint was complete, while a trainer runs."""
    life, phase = account.life, account.state.get("phase")
    if life is None or phase not in ("running", "stopping", "flushing"):
        return 0.0
    since = life.started_at if newest is None else max(life.started_at, newest["time"])
    return max(now - since, 0.0)


def warnings(ledger: Line) -> list[str]:
    """What a person should look at."""
    found = []
    if ledger.get("started_over") and ledger.get("resumed"):
        found.append(
            f"the trainer was given the checkpoint of step {ledger['resumed']['step']} and started before it; "
            "what is stored is kept"
        )
    problem = ledger.get("uploads", {}).get("problem")
    if problem and ledger.get("uploads", {}).get("failures"):
        found.append(f"the last {ledger['uploads']['failures']} upload(s) failed: {problem}")
    if ledger.get("trained") and not ledger.get("stored") and not ledger.get("local"):
        found.append("no checkpoint was ever seen in CLOUDRUN_CHECKPOINT_DIR")
    return found
