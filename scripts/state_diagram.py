"""How phases follow one another, as a diagram: ``decide`` itself, asked with the tests' table of phases and events.

python -m scripts.state_diagram            print it
python -m scripts.state_diagram --write    put it into docs/guides/how-it-works.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from runner.core.decide import decide, wake_at
from runner.core.events import Event, Noticed, Woke
from runner.core.state import PHASE_NAMES, Ledger, Phase, State, Uploads
from scripts.pages import GUIDES, print_or_write
from tests.core.matrix import EVENTS, NOW, PHASES, POLICY, SAVED, ledger_for

PAGE = GUIDES / "how-it-works.md"
NAME = "state-diagram"

TIME = "its time is over"
IN_VAIN = "stale"
"""The detail of an event that belongs to another attempt, and so never counts."""

Edges = dict[tuple[str, str], set[str]]


def diagram() -> str:
    """All changes of phase, each with the events that may cause it."""
    names = list(PHASE_NAMES.values())
    found = edges()
    lines = [
        f"    {one} --> {other}: {label(found[one, other])}"
        for one in names
        for other in names
        if (one, other) in found
    ]
    head = ["```mermaid", "stateDiagram-v2", f"    [*] --> {names[0]}"]
    return "\n".join([*head, *lines, f"    {names[-1]} --> [*]", "```"]) + "\n"


def edges() -> Edges:
    """From phase to phase: the names of the events, as the tests' table calls them."""
    found: Edges = {}
    for state in states():
        happenings: list[tuple[str, Event, float]] = [(name, event, NOW) for name, event in EVENTS.items()]
        if (then := wake_at(POLICY, state)) < math.inf:
            happenings.append((TIME, Woke(), then))
        for name, event, at in happenings:
            step = phase_name(state), phase_name(decide(POLICY, state, event, at)[0])
            if step[0] != step[1]:
                found.setdefault(step, set()).add(name)
    return found


def states() -> Iterator[State]:
    """Each phase of the table with each ledger that it can rest with, which is to say: without an event it stays."""
    for phase in PHASES.values():
        for ledger in ledgers(phase):
            state = State(phase, ledger)
            if phase_name(decide(POLICY, state, Noticed("nothing"), NOW)[0]) == phase_name(state):
                yield state


def ledgers(phase: Phase) -> Iterator[Ledger]:
    """What may be known: the table's own, a new run, a checkpoint that is not stored, attempts that came to nothing."""
    usual = ledger_for(phase)
    yield usual
    yield replace(usual, stored=(), local=(), uploads=Uploads())
    yield replace(usual, local=(), uploads=Uploads(), fruitless=POLICY.max_without_progress - 1)
    yield replace(usual, local=(SAVED,), uploads=Uploads(current=SAVED, last_at=NOW))
    yield replace(usual, local=(SAVED,), uploads=Uploads(failures=1, last_at=NOW, retry_at=math.inf))


def phase_name(state: State) -> str:
    return PHASE_NAMES[type(state.phase)]


def label(names: set[str]) -> str:
    """Events in the table's order; the details of one are gathered, and left out where every one of them counts."""
    details: dict[str, list[str]] = {}
    for name in (*(name for name in EVENTS if name in names), *({TIME} & names)):
        event, _, detail = name.partition(", ")
        details.setdefault(event, []).append(detail)
    return ", ".join(
        event if is_plain(event, some) else f"{event} ({' / '.join(some)})" for event, some in details.items()
    )


def is_plain(event: str, details: list[str]) -> bool:
    known = {name.partition(", ")[2] for name in EVENTS if name.partition(", ")[0] == event} - {IN_VAIN}
    return details == [""] or set(details) == known


if __name__ == "__main__":
    print_or_write(PAGE, NAME, diagram())
