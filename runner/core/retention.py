"""Which stored checkpoints stay, which go, and why. When in doubt, keep."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from runner.core.policy import Best
from runner.core.state import Checkpoint, age, place


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one checkpoint stays, with the reason for people."""

    id: str
    keep: bool
    reason: str


def retain(
    checkpoints: Iterable[Checkpoint],
    *,
    last: int,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    best: Best | None = None,
    rejected: frozenset[str] = frozenset(),
    in_use: str | None = None,
) -> tuple[Verdict, ...]:
    """A verdict for each committed checkpoint, newest first: latest epoch, highest step, then time of the commit.

    last            how many of the newest good ones stay; at least one does, whatever it says
    every_steps     keep the first good one at or after each multiple of so many steps
    every_seconds   keep the first good one of each such span of time
    best            keep the good ones with the best values of a metric; those without one are not among them
    rejected        ids that proved unusable: they count for nothing, and go only when ``last`` good ones are newer
    in_use          the id that a trainer is being started from
    """
    ranked = sorted(checkpoints, key=_rank, reverse=True)
    good = [checkpoint for checkpoint in ranked if checkpoint.id not in rejected]
    newest = good[: max(1, last)]
    kept = {checkpoint.id: _last(last) for checkpoint in newest}
    kept = _by_steps(good, every_steps) | _by_time(good, every_seconds) | _by_metric(good, best) | kept
    verdicts = []
    for checkpoint in ranked:
        if checkpoint.id == in_use:
            verdicts.append(Verdict(checkpoint.id, keep=True, reason="being resumed from"))
        elif checkpoint.id in rejected:
            verdicts.append(_on_rejected(checkpoint, good, max(1, last)))
        elif checkpoint.id in kept:
            verdicts.append(Verdict(checkpoint.id, keep=True, reason=kept[checkpoint.id]))
        else:
            verdicts.append(Verdict(checkpoint.id, keep=False, reason=f"superseded by step {newest[-1].step}"))
    return tuple(verdicts)


def _rank(checkpoint: Checkpoint) -> tuple[int, int, float, str]:
    return *age(checkpoint), checkpoint.id


def _last(count: int) -> str:
    return f"last {count}" if count > 1 else "newest"


def _on_rejected(checkpoint: Checkpoint, good: list[Checkpoint], last: int) -> Verdict:
    newer = sum(place(other) >= place(checkpoint) for other in good)
    if newer >= last:
        return Verdict(checkpoint.id, keep=False, reason=f"unusable, superseded by step {good[0].step}")
    return Verdict(checkpoint.id, keep=True, reason=f"unusable, but kept until {last} good ones are as new")


def _by_steps(good: list[Checkpoint], every: int | None) -> dict[str, str]:
    if not every or every < 1:
        return {}
    due = [(checkpoint.step // every, checkpoint) for checkpoint in good if checkpoint.step >= every]
    return dict.fromkeys(_firsts(due), f"milestone every {every} steps")


def _by_time(good: list[Checkpoint], every: float | None) -> dict[str, str]:
    if not every or every <= 0:
        return {}
    due = [(checkpoint.time // every, checkpoint) for checkpoint in good]
    return dict.fromkeys(_firsts(due), f"milestone every {every:g} s")


def _by_metric(good: list[Checkpoint], best: Best | None) -> dict[str, str]:
    if best is None:
        return {}
    told = [(dict(checkpoint.metrics).get(best.metric, math.nan), checkpoint.id) for checkpoint in good]
    sign = 1.0 if best.mode == "min" else -1.0
    # Sorted newest first before: of equal values the newest counts as the better one.
    ranked = sorted(((value, id_) for value, id_ in told if math.isfinite(value)), key=lambda pair: sign * pair[0])
    return {id_: f"best {best.metric} ({value:.6g})" for value, id_ in ranked[: max(best.last, 1)]}


def _firsts(due: Iterable[tuple[float, Checkpoint]]) -> list[str]:
    """The oldest of each span; the list comes newest first, so the last one in counts."""
    return list({span: checkpoint.id for span, checkpoint in due}.values())
