"""A world in which machines vanish, trainers crash and stores refuse, as a discrete-event simulation of ``decide``.

It stands in for everything outside the core: time, disks, the store, the trainer, the cloud. It is kept honest by
the invariants, which it checks against its own truth, not against what the ledger believes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import NoReturn

from runner.core import actions as do
from runner.core import events as on
from runner.core.actions import Action
from runner.core.decide import decide, wake_at
from runner.core.events import Event
from runner.core.policy import Policy
from runner.core.state import Checkpoint, Ending, Finished, Rejected, State, usable

LAST_STEP = 100
STEP_SECONDS = 10.0
SAVE_EVERY = 5


@dataclass(frozen=True)
class Faults:
    """Chances, each per opportunity, and how many faults there are in all: without an end nothing could ever finish."""

    crash: float = 0.0
    hang: float = 0.0
    kill_supervisor: float = 0.0
    new_machine: float = 0.5
    notice: float = 0.0
    withdraw: float = 0.3
    stop: float = 0.0
    upload_fails: float = 0.0
    upload_hopeless: float = 0.0
    corrupt: float = 0.0
    poison: float = 0.0
    deaf: float = 0.0
    recover_fails: float = 0.0
    budget: int = 40


@dataclass
class Trainer:
    attempt: int
    step: int
    resumed: int = -1
    signalled: bool = False
    deaf: bool = False
    hung: bool = False


@dataclass
class Disk:
    """What a machine's disk holds; a new machine has a new one."""

    local: dict[str, Checkpoint] = field(default_factory=dict)
    trained: bool = False


class BrokenPromise(AssertionError):
    """An invariant does not hold; the message says which, and the history of the world."""


class World:
    """One job, from its first submit to its end, over as many machines as it takes."""

    def __init__(self, seed: int, faults: Faults, policy: Policy | None = None) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.left = faults.budget
        self.policy = policy or Policy(upload_every=40.0, max_without_progress=3)
        self.now = 1_000_000.0
        self.stored: dict[str, Checkpoint] = {}
        self.corrupt: set[str] = set()
        self.poisoned: set[str] = set()
        self.done = False
        self.highest_attempt = 0
        self.finished_step: int | None = None
        self.disk = Disk()
        self.trainer: Trainer | None = None
        self.queue: list[tuple[float, int, Event | str]] = []
        self.ticket = 0
        self.lives = 0
        self.state = State()
        self.log: list[str] = []
        self.serial = 0

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, most_lives: int = 400) -> Ending:
        """Submit again and again, as a scheduler would, until the job is done or has failed for good."""
        while True:
            self.lives += 1
            if self.lives > most_lives:
                self.broken("the job does not end")
            ending = self.live()
            if ending is not None and ending.exit_code not in (75, 130, 143):
                self.check_end(ending)
                return ending
            if ending is None and self.chance(self.faults.new_machine):
                self.disk = Disk()
            self.now += 30.0

    def live(self) -> Ending | None:
        """One life of a supervisor. None when it was killed or its machine vanished."""
        self.state, self.queue, self.trainer = State(), [], None
        self.post(0.0, on.Started())
        if self.happens(self.faults.kill_supervisor):
            self.post(self.random.uniform(0.0, 1500.0), "die")
        if self.happens(self.faults.notice):
            self.post(self.random.uniform(0.0, 900.0), "notice")
        if self.happens(self.faults.stop):
            self.post(self.random.uniform(0.0, 900.0), "stop")
        turns = 0
        while self.turn():
            if isinstance(self.state.phase, Finished):
                if self.trainer is not None:
                    self.broken("left while the trainer runs")
                return self.state.phase.ending
            turns += 1
            if turns > 100_000:
                self.broken("the loop spins")
        return None

    def turn(self) -> bool:
        """The next thing that happens. False when the machine is gone."""
        due = wake_at(self.policy, self.state)
        if self.queue and self.queue[0][0] <= due:
            at, _, thing = heapq.heappop(self.queue)
        elif due < math.inf:
            at, thing = due, on.Woke()
        else:
            self.broken("nothing will ever happen")
        if at < self.now and isinstance(thing, on.Woke):
            self.broken("asked to wake in the past")
        self.now = max(self.now, at)
        if thing == "die":
            return False
        self.step(self.outside(thing) if isinstance(thing, str) else thing)
        return True

    def step(self, event: Event | None) -> None:
        if event is None:
            return
        before = self.state
        self.state, actions = decide(self.policy, self.state, event, self.now)
        phase = type(self.state.phase).__name__
        self.log.append(f"{self.now:.0f} {event} -> {phase} {[type(a).__name__ for a in actions]}")
        if wake_at(self.policy, self.state) <= self.now:
            self.broken("wants to wake at once: a loop that spins")
        if decide(self.policy, before, event, self.now) != (self.state, actions):
            self.broken("decide is not a function")
        for action in actions:
            self.perform(action)

    # -- what the outside does -----------------------------------------------------------------------------------------

    def outside(self, thing: str) -> Event | None:
        if thing == "stop":
            person = self.random.random() < 0.5
            ending = Ending("stopped", 143, "stop") if person else Ending("preempted", 75, "SIGTERM")
            if self.random.random() < 0.3:
                self.post(self.random.uniform(0.0, 40.0), "stop")
            return on.StopRequested(ending, now=self.random.random() < 0.2)
        if thing == "notice":
            lead = self.random.choice([5.0, 30.0, 120.0, 300.0])
            if self.random.random() < self.faults.withdraw:
                self.post(self.random.uniform(1.0, lead), "withdraw")
            else:
                self.post(lead, "die")
            return on.NoticeReceived("cloud", self.now + lead, "the cloud takes it")
        if thing == "withdraw":
            return on.NoticeWithdrawn("cloud")
        return self.train(thing)

    def train(self, thing: str) -> Event | None:
        """The trainer's own clockwork. ``thing`` is ``<what> <attempt>``."""
        what, attempt = thing.split()
        trainer = self.trainer
        if trainer is None or trainer.attempt != int(attempt):
            return None
        if what == "exit143":
            return self.exit(143)
        if what == "save":
            self.save(trainer)
            return self.exit(self.random.choice([0, 143]))
        if trainer.hung:
            return None
        if self.happens(self.faults.hang):
            trainer.hung = True
            self.post(60.0, on.TrainerHung(trainer.attempt, "no progress"))
            return None
        if self.happens(self.faults.crash):
            return self.exit(self.random.choice([1, -9, -11]))
        trainer.step = min(trainer.step + 1, LAST_STEP)
        if trainer.step % SAVE_EVERY == 0 and trainer.step != trainer.resumed:
            self.save(trainer)
        if trainer.step >= LAST_STEP:
            self.finished_step = trainer.step
            return self.exit(0)
        self.post(STEP_SECONDS, f"step {trainer.attempt}")
        return on.Progressed(trainer.attempt, trainer.step, LAST_STEP, 0.1)

    def save(self, trainer: Trainer) -> None:
        self.serial += 1
        name = f"step-{trainer.step}"
        checkpoint = Checkpoint(
            f"local:{name}", trainer.step, name, trainer.attempt, 1, 100, f"s{self.serial}", self.now
        )
        self.disk.local[name] = checkpoint
        self.step(on.CheckpointSaved(trainer.attempt, checkpoint))

    def exit(self, code: int) -> Event:
        trainer = self.trainer
        assert trainer is not None
        self.trainer = None
        return on.TrainerExited(trainer.attempt, code)

    # -- what actions do -----------------------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:  # noqa: C901, PLR0912 - one arm per action
        match action:
            case do.Recover():
                self.recover()
            case do.Prepare(attempt):
                self.highest_attempt = max(self.highest_attempt, attempt)
                self.post(20.0, on.Prepared(attempt))
            case do.Restore(attempt, checkpoint):
                self.restore(attempt, checkpoint)
            case do.StartTrainer(attempt, resume, _):
                self.start(attempt, resume)
            case do.SignalTrainer(attempt, to):
                self.signal(attempt, to)
            case do.KillTrainer(attempt):
                if self.trainer is not None and self.trainer.attempt == attempt:
                    self.post(0.1, self.exit(-9))
            case do.Upload(checkpoint):
                self.upload(checkpoint)
            case do.Prune(verdicts):
                self.prune(tuple(id_ for id_, _ in verdicts))
            case do.NoteTrained(_):
                self.disk.trained = True
            case do.MarkDone():
                if self.happens(self.faults.upload_fails):
                    self.post(2.0, on.DoneNotMarked("the store refuses"))
                else:
                    self.done = True
                    self.post(1.0, on.DoneMarked())
            case do.AnnounceStop():
                pass

    def recover(self) -> None:
        if self.happens(self.faults.recover_fails):
            self.post(60.0, on.RecoverFailed("the store is away", 75))
            return
        signatures = {one.signature for one in self.stored.values()}
        local = tuple(one for one in self.disk.local.values() if one.signature not in signatures)
        trained = self.disk.trained and any(one.step == LAST_STEP for one in (*local, *self.stored.values()))
        stored = tuple(self.stored.values())
        rejected: tuple[Rejected, ...] = ()
        if self.corrupt and self.random.random() < 0.3:
            bad = self.random.choice(sorted(self.corrupt))
            rejected = (Rejected(bad, None, "an object is missing"),)
            stored = tuple(one for one in stored if one.id != bad)
        self.post(1.0, on.Recovered(1, self.highest_attempt, stored, local, rejected, self.done, trained))

    def restore(self, attempt: int, checkpoint: Checkpoint) -> None:
        local = checkpoint.id.startswith("local:")
        good = checkpoint.id not in self.corrupt and (local or checkpoint.id in self.stored)
        if good:
            self.post(5.0, on.Restored(attempt, checkpoint.id, f"/c/{checkpoint.name}"))
        else:
            self.post(5.0, on.CheckpointRejected(attempt, checkpoint.id, "a digest does not match"))

    def start(self, attempt: int, resume: Checkpoint | None) -> None:
        if self.trainer is not None:
            self.broken("two trainers")
        self.check_resume(resume)
        self.highest_attempt = max(self.highest_attempt, attempt)
        self.trainer = Trainer(attempt, resume.step if resume else 0, deaf=self.random.random() < self.faults.deaf)
        self.trainer.resumed = resume.step if resume else -1
        self.post(0.5, on.TrainerStarted(attempt, 42, "python train.py"))
        if resume is not None and resume.signature in self.poisoned:
            self.post(3.0, f"exit143 {attempt}")
        else:
            self.post(STEP_SECONDS, f"step {attempt}")

    def signal(self, attempt: int, to: str) -> None:
        trainer = self.trainer
        if trainer is None or trainer.attempt != attempt or trainer.deaf or trainer.hung:
            return
        if to == "group":
            self.post(0.1, f"exit143 {attempt}")
        elif not trainer.signalled:
            trainer.signalled = True
            self.post(self.random.uniform(0.0, 60.0), f"save {attempt}")

    def upload(self, checkpoint: Checkpoint) -> None:
        seconds = self.random.uniform(1.0, 60.0)
        if self.happens(self.faults.upload_hopeless):
            self.post(1.0, on.UploadFailed(checkpoint.id, "access denied", retryable=False))
        elif self.happens(self.faults.upload_fails):
            gone = checkpoint.step != LAST_STEP and self.random.random() < 0.3
            if gone:
                self.disk.local.pop(checkpoint.name, None)
            self.post(seconds, on.UploadFailed(checkpoint.id, "the store refuses", gone=gone))
        else:
            self.post(seconds, self.commit(checkpoint, seconds))

    def commit(self, checkpoint: Checkpoint, seconds: float) -> Event:
        """The manifest is written at once; the news of it may come too late."""
        self.serial += 1
        stored = replace(
            checkpoint, id=f"step-{checkpoint.step:03d}.a{checkpoint.attempt}-{self.serial}", time=self.now
        )
        if self.happens(self.faults.corrupt):
            self.corrupt.add(stored.id)
        elif self.happens(self.faults.poison):
            self.poisoned.add(stored.signature)
        self.stored[stored.id] = stored
        return on.Uploaded(checkpoint.id, stored, seconds)

    def prune(self, ids: tuple[str, ...]) -> None:
        if self.happens(self.faults.upload_fails):
            self.post(2.0, on.Pruned(ids, "the store refuses"))
            return
        for id_ in ids:
            self.stored.pop(id_, None)
        self.post(2.0, on.Pruned(ids))
        bad = self.state.ledger.rejected
        known_bad = {rejected.id for rejected in bad} | {rejected.signature for rejected in bad}
        if all({one.id, one.signature} & known_bad for one in self.stored.values()):
            self.broken("retention left no checkpoint that is not known to be bad")

    # -- promises ------------------------------------------------------------------------------------------------------

    def good(self) -> list[Checkpoint]:
        bad = self.corrupt
        return [one for one in self.stored.values() if one.id not in bad and one.signature not in self.poisoned]

    def check_resume(self, resume: Checkpoint | None) -> None:
        """Never from older than the newest known, never silently from the beginning."""
        bad = self.state.ledger.rejected
        set_aside = {rejected.id for rejected in bad} | {rejected.signature for rejected in bad}
        best = max((one.step for one in self.good() if not {one.id, one.signature} & set_aside), default=-1)
        have = resume.step if resume else -1
        if have < best:
            self.broken(f"resumed at {have} although step {best} is stored and good")
        best_known = next(iter(usable(self.state.ledger)), None)
        if best_known is not None and (resume is None or resume.signature != best_known.signature):
            self.broken("resumed from older than the newest known")

    def check_end(self, ending: Ending) -> None:
        if ending.exit_code == 0:
            if self.finished_step != LAST_STEP or not self.done:
                self.broken("success although training has not finished")
            if all(one.step != LAST_STEP for one in self.stored.values()):
                self.broken("success although the last checkpoint is not stored")
        elif ending.exit_code == 73 and all(one.step != LAST_STEP for one in self.disk.local.values()):
            self.broken("the last checkpoint is neither stored nor on the disk")

    def broken(self, what: str) -> NoReturn:
        raise BrokenPromise(what + "\n" + "\n".join(self.log[-60:]))

    # -- dice ----------------------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def happens(self, probability: float) -> bool:
        """A fault, while there are any left."""
        if self.left <= 0 or not self.chance(probability):
            return False
        self.left -= 1
        return True

    def post(self, delay: float, thing: Event | str) -> None:
        self.ticket += 1
        heapq.heappush(self.queue, (self.now + delay, self.ticket, thing))
