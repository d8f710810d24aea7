"""One training job over the machines of a recorded spot trace, in simulated time.

The product's own ``decide`` runs it, event by event: what it orders is done by a simulated store and trainer, which
take their time. When a machine goes, everything that is not in the store goes with it. What simpler schedules keep is
counted beside it, on the same machines.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.core import actions as do
from runner.core import events as on
from runner.core.actions import Action
from runner.core.decide import decide, wake_at
from runner.core.events import Event
from runner.core.hazard import no_lives, with_life
from runner.core.ledger import learned_from
from runner.core.policy import Policy
from runner.core.record import plain
from runner.core.state import NO_HISTORY, Checkpoint, Finished, History, State


@dataclass(frozen=True, slots=True)
class Timing:
    """What things take, in seconds.

    restart   from the machine's first second to the first step of training
    save      a blocking save, until it is complete
    stall     what ``runner.training`` blocks for one; ``persist`` until it is complete after that
    upload    from the local disk to the store
    step      one step of training; saves begin between two steps
    notice    how long before its end a machine is told; 0: never
    """

    restart: float = 30.0
    save: float = 20.0
    stall: float = 0.5
    persist: float = 5.0
    upload: float = 10.0
    step: float = 1.0
    notice: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Lives of machines, in seconds, one after the other."""

    name: str
    lives: tuple[float, ...]

    @property
    def paid(self) -> float:
        return sum(self.lives)


def read_trace(path: Path, name: str) -> Trace:
    """A trace file: how many machines there were, each ``gap_seconds``. Training runs while all of them are there.

    Raises ValueError, KeyError or TypeError when the file holds something else.
    """
    told = json.loads(path.read_bytes())
    gap, counts = float(told["metadata"]["gap_seconds"]), told["data"]
    full = max(counts)
    runs = ((count, len(list(run))) for count, run in itertools.groupby(counts))
    return Trace(name, tuple(length * gap for count, length in runs if count == full and full > 0))


# -- simpler schedules -------------------------------------------------------------------------------------------------


def kept_by_schedule(trace: Trace, timing: Timing, every: float) -> float:
    """Seconds of training kept by blocking saves after each so much training. What was saved is stored at once."""
    cycle = every + timing.save
    return sum(max((life - timing.restart) // cycle, 0.0) * every for life in trace.lives)


def kept_perfectly(trace: Trace, timing: Timing) -> float:
    """Seconds of training kept when saves cost nothing, and every step is stored at once."""
    return sum(max(life - timing.restart, 0.0) for life in trace.lives)


# -- the product -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer that can be asked for saves. With ``tells``, it says what they cost."""

    stall: float
    persist: float
    tells: bool


def with_library(timing: Timing) -> Trainer:
    return Trainer(timing.stall, timing.persist, tells=True)


def unmodified(timing: Timing) -> Trainer:
    """A script that saves when it gets a signal, and stands still meanwhile."""
    return Trainer(timing.save, 0.0, tells=False)


@dataclass
class Replay:
    """The job on its way through a trace; what outlives machines. ``stalled`` and ``restarted`` are seconds lost so."""

    policy: Policy
    timing: Timing
    trainer: Trainer
    store: dict[str, Checkpoint] = field(default_factory=dict)
    history: History = NO_HISTORY
    attempts: int = 0
    stalled: float = 0.0
    restarted: float = 0.0
    saves: int = 0

    def kept(self, trace: Trace) -> float:
        """Seconds of training that are in the store when the trace is over."""
        now, lives = 0.0, no_lives()
        for life in trace.lives:
            machine = Machine(self, now, now + life)
            machine.live()
            lives = with_life(lives, 0.0, life, lost=True)
            learned = learned_from(plain(machine.state.ledger))
            self.history = replace(learned, lives=lives)
            now += life + 60.0
        return max((one.step for one in self.store.values()), default=0) * self.timing.step


class Machine:
    """One machine with its supervisor and its trainer, from ``now`` to ``end``."""

    def __init__(self, replay: Replay, now: float, end: float) -> None:
        self.replay = replay
        self.timing = replay.timing
        self.now, self.end = now, end
        self.state = State()
        self.queue: list[tuple[float, int, Callable[[], Event | None]]] = []
        self.tickets = itertools.count()
        # The trainer has made ``steps`` steps at ``since``, and goes on from there.
        self.steps, self.since = 0, math.inf

    def live(self) -> None:
        self.at(self.now, on.Started())
        if self.timing.notice:
            told = max(self.end - self.timing.notice, self.now)
            self.at(told, on.NoticeReceived("cloud", self.end, "the cloud takes it"))
        while not isinstance(self.state.phase, Finished):
            due = wake_at(self.replay.policy, self.state)
            if min(due, self.queue[0][0] if self.queue else math.inf) >= self.end:
                return
            if self.queue and self.queue[0][0] <= due:
                self.now, _, happens = heapq.heappop(self.queue)
                event = happens()
            else:
                self.now, event = max(self.now, due), on.Woke()
            if event is not None:
                self.turn(event)

    def turn(self, event: Event) -> None:
        self.state, actions = decide(self.replay.policy, self.state, event, self.now)
        for action in actions:
            self.perform(action)

    def at(self, when: float, event: Event) -> None:
        self.then(when, lambda: event)

    def then(self, when: float, happens: Callable[[], Event | None]) -> None:
        heapq.heappush(self.queue, (when, next(self.tickets), happens))

    def perform(self, action: Action) -> None:
        now, timing, replay = self.now, self.timing, self.replay
        match action:
            case do.TakeLease():
                self.at(now, on.LeaseTaken("sim", "sim", 1))
            case do.Recover():
                stored = tuple(replay.store.values())
                self.at(now, on.Recovered(1, replay.attempts, stored, history=replay.history))
            case do.Prepare(attempt):
                self.at(now, on.Prepared(attempt))
            case do.Restore(attempt, checkpoint):
                self.at(now, on.Restored(attempt, checkpoint.id, checkpoint.name))
            case do.StartTrainer(attempt, resume, _):
                self.start(attempt, resume)
            case do.AskSave(attempt):
                self.save(attempt)
            case do.SignalTrainer(attempt, "ranks"):
                self.at(self.save(attempt), on.TrainerExited(attempt, 143))
            case do.Upload(checkpoint):
                self.then(now + timing.upload, lambda: self.commit(checkpoint))
            case do.Prune(verdicts):
                ids = tuple(id_ for id_, _ in verdicts)
                replay.store = {id_: one for id_, one in replay.store.items() if id_ not in ids}
                self.at(now, on.Pruned(ids))
            case _:
                pass

    def start(self, attempt: int, resume: Checkpoint | None) -> None:
        self.replay.attempts = attempt
        self.steps, self.since = resume.step if resume else 0, self.now + self.timing.restart
        self.replay.restarted += min(self.timing.restart, self.end - self.now)
        self.at(self.now, on.TrainerStarted(attempt, 1, "train"))
        self.at(self.now, on.TrainerJoined(attempt))
        self.at(self.since + self.timing.step, on.Progressed(attempt, self.steps + 1))

    def save(self, attempt: int) -> float:
        """Begin a save at the end of the present step; the instant at which it is complete."""
        done = max(math.ceil((self.now - self.since) / self.timing.step), 0)
        trainer, begins = self.replay.trainer, self.since + done * self.timing.step
        self.steps, self.since = self.steps + done, begins + trainer.stall
        self.replay.stalled += max(min(trainer.stall, self.end - begins), 0.0)
        self.replay.saves += 1
        complete = self.since + trainer.persist
        name = f"step-{self.steps}"
        checkpoint = Checkpoint(f"local:{name}", self.steps, name, attempt, 1, 1, name, complete, 1)
        self.at(complete, saved(attempt, checkpoint, trainer))
        return complete

    def commit(self, checkpoint: Checkpoint) -> Event:
        stored = replace(checkpoint, id=checkpoint.name, time=self.now)
        self.replay.store[stored.id] = stored
        return on.Uploaded(checkpoint.id, stored, self.timing.upload)


def saved(attempt: int, checkpoint: Checkpoint, trainer: Trainer) -> Event:
    if not trainer.tells:
        return on.CheckpointSaved(attempt, checkpoint)
    return on.CheckpointSaved(attempt, checkpoint, stall=trainer.stall, persist=trainer.persist)


# -- everything side by side -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """What one way of saving keeps of the paid time, 0 to 1; where known, what else it goes to."""

    way: str
    kept: float
    stalled: float | None = None
    restarted: float | None = None
    saves: int | None = None


SCHEDULES = {"50 min": 3000.0, "10 min": 600.0}
EPOCH, SCRIPT, LIBRARY, PERFECT = "epoch", "script", "library", "perfect"
WAYS = (*SCHEDULES, EPOCH, SCRIPT, LIBRARY, PERFECT)
"""Fixed schedules; cloudrun with a script that saves when asked, and with ``runner.training``; free saves."""


def scores(trace: Trace, timing: Timing, epoch: float) -> Iterator[Score]:
    """All ways of saving on one trace."""
    for name, every in (SCHEDULES | {EPOCH: epoch}).items():
        yield Score(name, kept_by_schedule(trace, timing, every) / trace.paid)
    yield product(SCRIPT, trace, timing, unmodified(timing))
    yield product(LIBRARY, trace, timing, with_library(timing))
    yield Score(PERFECT, kept_perfectly(trace, timing) / trace.paid)


def product(way: str, trace: Trace, timing: Timing, trainer: Trainer) -> Score:
    replay = Replay(Policy(), timing, trainer)
    kept = replay.kept(trace)
    return Score(way, kept / trace.paid, replay.stalled / trace.paid, replay.restarted / trace.paid, replay.saves)
