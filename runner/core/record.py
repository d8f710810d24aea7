"""One line of the journal: what happened, where it left the job, what was ordered. Plain data, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from runner.core.actions import Action
from runner.core.events import Event, Progressed, Woke
from runner.core.state import PHASE_NAMES, State

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One turn of the loop, from the state ``before`` it to ``state``."""

    at: float
    before: State
    event: Event
    state: State
    actions: tuple[Action, ...]


def is_worth_a_line(entry: Entry) -> bool:
    """Waking up for nothing is not; a phase that ends because its time is over is."""
    moved = entry.state.phase != entry.before.phase
    return not isinstance(entry.event, Woke) or bool(entry.actions) or moved


def to_line(entry: Entry) -> Line:
    """The entry as the journal holds it. Mere progress leaves the state out: it is frequent, and says it all."""
    line: Line = {"at": round(entry.at, 3), "event": plain(entry.event)}
    if isinstance(entry.event, Progressed) and not entry.actions:
        return line
    line["state"] = {
        "phase": PHASE_NAMES[type(entry.state.phase)],
        "details": plain(entry.state.phase),
        "ledger": plain(entry.state.ledger),
    }
    line["actions"] = [plain(action) for action in entry.actions]
    return line


def plain(value: Any) -> Any:
    """Dataclasses become objects with their class's name as ``type``, tuples lists, what JSON cannot count None."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {"type": type(value).__name__}
        return named | {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """The same data with every text passed through ``redact``; numbers and structure stay, whatever a secret is."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redacted(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, redact) for item in value]
    return value
