"""Status for people: the same facts as the JSON, said so that the important ones are seen first."""

from __future__ import annotations

from typing import Any

from runner.units import format_duration, format_size

Status = dict[str, Any]


def render(told: Status, now: float) -> str:
    """Some aligned lines; what nobody knows is left out, except where not knowing is the news."""
    rows = [
        ("job", f"{told['job']}, run {told['run']}" if told["run"] else told["job"]),
        ("phase", phase(told, now)),
        ("lease", lease(told["lease"])),
        ("attempt", attempt(told)),
        ("step", step(told)),
        ("checkpoint", checkpoint(told["checkpoint"])),
        ("at risk", at_risk(told)),
        ("saves", cadence(told["cadence"])),
        ("resumed", resumed(told["resumed_from"])),
        ("restarts", restarts(told["restarts"])),
        ("retries", retries(told["retries"], now)),
        ("last stop", last_stop(told["last_stop"])),
        ("goodput", f"{told['goodput']:.1%}" if told["goodput"] is not None else ""),
        ("cost", cost(told["cost"])),
    ]
    rows += [("set aside", f"{one['id']}: {one['reason']}") for one in told["rejected"]]
    rows += [("warning", warning) for warning in told["warnings"]]
    return "\n".join(f"{name:<11} {value}" for name, value in rows if value)


def summary(told: Status, now: float) -> str:
    """One line."""
    where = f"step {told['step']}" if told["step"] is not None else "no step yet"
    return f"{told['job']}: {phase(told, now)}, {where}"


def phase(told: Status, now: float) -> str:
    if told["phase"] == "finished":
        why = f": {told['reason']}" if told["reason"] else ""
        return f"{told['outcome']} (exit code {told['exit_code']}){why}"
    if told["phase"] == "waiting" and told["reason"]:
        return f"waiting, as a standby: {told['reason']}"
    if told["alive"] is False:
        return f"was {told['phase']} when its supervisor vanished; submit goes on with it"
    if told["alive"] is None and told["heard_at"] is not None:
        return f"{told['phase']}, as it said {format_duration(now - told['heard_at'])} ago"
    return str(told["phase"])


def lease(held: dict[str, Any] | None) -> str:
    if held is None:
        return ""
    waiting = f"; standing by: {', '.join(held['standby'])}" if held["standby"] else ""
    return f"held by {held['host']}{waiting}"


def cadence(told: dict[str, Any] | None) -> str:
    """How often, and why."""
    return str(told["reason"]) if told else ""


def attempt(told: Status) -> str:
    return f"{told['attempt']} on {told['host']}" if told["attempt"] else ""


def step(told: Status) -> str:
    if told["step"] is None:
        return "unknown: none was recognised in the output, and none came over the socket"
    text = f"{told['step']}" + (f" of {told['total']}" if told["total"] else "")
    if told["rate"]:
        text += f", {rate(told['rate'])} a second"
    if told["eta_s"] is not None and told["phase"] == "running":
        text += f", {format_duration(told['eta_s'])} to go"
    return text


def rate(steps: float) -> str:
    return f"{steps:.0f}" if steps >= 100 else f"{steps:.3g}"


def checkpoint(newest: dict[str, Any]) -> str:
    lag = f"; {format_size(newest['lag_bytes'])} on the way" if newest["lag_bytes"] else ""
    if newest["step"] is None:
        return f"none is stored{lag}"
    return f"step {newest['step']}, stored {format_duration(newest['age_s'])} ago{lag}"


def at_risk(told: Status) -> str:
    risk = told["checkpoint"]["at_risk_s"]
    if not risk:
        return ""
    money, currency = told["checkpoint"]["at_risk_cost"], told["cost"]["currency"]
    return f"{format_duration(risk)} of work" + (f", {money:.2f} {currency}" if money and currency else "")


def resumed(source: dict[str, Any] | None) -> str:
    return f"from step {source['step']} ({source['id']})" if source else ""


def restarts(counts: dict[str, int]) -> str:
    return f"{counts['total']} ({counts['fruitless']} fruitless in a row, {counts['preemptions']} preemption(s))"


def retries(counts: dict[str, Any], now: float) -> str:
    """Of requests to stores; left out where none was needed."""
    if not counts["total"]:
        return ""
    most_first = sorted(counts["operations"].items(), key=lambda one: (-one[1], one[0]))
    kinds = ", ".join(f"{count} {operation}" for operation, count in most_first)
    last = counts["last"]
    return f"{counts['total']} ({kinds}), the last {format_duration(now - last['at'])} ago: {last['reason']}"


def last_stop(stop: dict[str, Any] | None) -> str:
    return f"{stop['cause']}: {stop['reason']}" if stop else ""


def cost(money: dict[str, Any]) -> str:
    if money["spent"] is None:
        return ""
    saved = f", {money['saved']:.2f} saved" if money["saved"] is not None else ""
    return f"{money['spent']:.2f} {money['currency']} spent{saved}"
