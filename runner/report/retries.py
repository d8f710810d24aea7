"""How often requests to a store were tried again, of which kind, and why the last time: from the journal's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.core.record import Line


@dataclass(frozen=True, slots=True)
class Retries:
    """What the lines so far amount to. ``operations`` counts by what was tried again; ``last`` is a journal line."""

    operations: Mapping[str, int] = field(default_factory=dict)
    last: Line | None = None


def tally(retries: Retries, line: Line) -> Retries:
    """The same with one more line; of most of them nothing is taken."""
    event = line["event"]
    if event.get("type") != "StoreStruggled":
        return retries
    operation = str(event.get("operation"))
    return Retries({**retries.operations, operation: retries.operations.get(operation, 0) + 1}, line)


def describe(retries: Retries) -> dict[str, Any]:
    """As ``cloudrun status --json`` has them."""
    last = retries.last
    return {
        "total": sum(retries.operations.values()),
        "operations": dict(retries.operations),
        "last": last and {**{key: last["event"].get(key) for key in ("operation", "reason")}, "at": last["at"]},
    }
