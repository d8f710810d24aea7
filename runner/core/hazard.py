"""How long a machine will live: what was seen of its like, and before that a guess that counts as one loss seen.

Gamma prior, Poisson losses. A guess of a mean life ``g`` is worth one loss in ``g`` seconds: after ``n`` losses in
``t`` seconds the rate is (1 + n) / (g + t). Many machines die young, and those that got old stay: each band of ages
has its own rate, to which the rate of all ages is the prior, worth ``TRUST`` losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from runner.core.state import Band

AGES = (1800.0, 7200.0, math.inf)
TRUST = 2.0


def no_lives() -> tuple[Band, ...]:
    """Nothing seen yet."""
    return tuple(Band(until) for until in AGES)


def with_life(bands: tuple[Band, ...], begun: float, ended: float, *, lost: bool) -> tuple[Band, ...]:
    """One more machine, watched from the age ``begun`` to the age ``ended`` (seconds), and then ``lost`` or not."""
    counted, lower = [], 0.0
    for band in bands or no_lives():
        seconds = max(min(ended, band.until) - max(begun, lower), 0.0)
        dies_here = lost and lower <= max(ended, begun) < band.until
        counted.append(replace(band, seconds=band.seconds + seconds, lost=band.lost + dies_here))
        lower = band.until
    return tuple(counted)


def mean_life(bands: Iterable[Band], age: float, guess: float) -> float:
    """Seconds that a machine of this age can be expected to live on, were its rate of losses to stay as it is now."""
    bands = tuple(bands) or no_lives()
    overall = rate(1.0, guess, bands)
    own = next(band for band in bands if age < band.until)
    return 1.0 / rate(TRUST, TRUST / overall, (own,))


def rate(losses: float, seconds: float, bands: Iterable[Band]) -> float:
    """Losses a second, when so many in so many seconds were believed before anything was seen."""
    bands = tuple(bands)
    return (losses + sum(band.lost for band in bands)) / (seconds + sum(band.seconds for band in bands))


def losses_seen(bands: Iterable[Band]) -> int:
    return sum(band.lost for band in bands)
