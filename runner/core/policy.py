"""What the owner asked for, as far as decisions need it. Seconds, steps and counts; no text to parse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExitRule = Literal["restart", "fail", "succeed"]


@dataclass(frozen=True, slots=True)
class Best:
    """A metric that the trainer reports with its checkpoints, and which end of it is good; ``last`` so many stay."""

    metric: str
    mode: Literal["min", "max"] = "min"
    last: int = 1


@dataclass(frozen=True, slots=True)
class Keep:
    """Which stored checkpoints stay: the ``last`` so many, a milestone each so many steps or seconds, the ``best``."""

    last: int = 3
    every_steps: int | None = None
    every_seconds: float | None = None
    best: Best | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of a job spec that ``decide`` reads.

    upload_every          seconds between uploads while the trainer runs, and between saves of one that can be asked;
                          None: the cadence weighs what a save costs against what is at risk
    mean_life             seconds that a machine lives on average, as long as nothing is known of its like
    give_up_storing       seconds that a finished job keeps trying to store its last checkpoint
    grace                 seconds between the stop signal and force
    max_without_progress  fruitless attempts in a row before the job is given up
    backoff_first         seconds to wait after the first fruitless attempt; doubles up to ``backoff_limit``
    on_exit               what an exit code of the trainer means, where it is not the default
    keep                  which stored checkpoints stay
    """

    upload_every: float | None = None
    mean_life: float = 7200.0
    give_up_storing: float = 3600.0
    grace: float = 30.0
    max_without_progress: int = 3
    backoff_first: float = 5.0
    backoff_limit: float = 300.0
    on_exit: tuple[tuple[int, ExitRule], ...] = ()
    keep: Keep = Keep()
