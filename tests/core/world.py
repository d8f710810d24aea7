"""A world in which machines vanish and freeze, trainers crash and stores refuse: ``decide``, event by event.

It stands in for everything outside the core: time, disks, the store, its lease, the trainer, the cloud. It is kept
honest by the invariants, which it checks against its own truth, not against what the ledgers believe.
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
from runner.core.cadence import LEAST_PATIENCE
from runner.core.decide import decide, wake_at
from runner.core.events import Event
from runner.core.hazard import no_lives, with_life
from runner.core.policy import Policy
from runner.core.state import Checkpoint, Ending, Finished, History, Rejected, State, place, usable
from runner.supervisor.lease_body import Note
from runner.supervisor.recovery import TrainedNote, still_holds, with_epochs

LAST_STEP = 100
STEP_SECONDS = 10.0
SAVE_EVERY = 5
STALL = 0.5
PERSIST = 3.0
PERIOD = 30.0
LOOK = 2.0
ASK_AGAIN = (75, 130, 143)


@dataclass(frozen=True)
class Faults:
    """Chances, each per opportunity, and how many faults there are in all: without an end nothing could ever finish.

    freeze     of a machine, for a while, with all that it does
    cut        of a machine's way to the store, for a while
    straggle   of a commit that was on its way when the lease was lost: it lands all the same
    askable    of a trainer that can be asked for saves; half of those make none by themselves
    lives      mean lives of kinds of machines, in seconds: with each submit one is drawn, and how long it lives
    """

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
    freeze: float = 0.0
    cut: float = 0.0
    straggle: float = 0.0
    start_over: float = 0.0
    askable: float = 0.0
    lives: tuple[float, ...] = ()
    budget: int = 40


@dataclass
class Trainer:
    attempt: int
    step: int
    resumed: int = -1
    signalled: bool = False
    deaf: bool = False
    hung: bool = False
    askable: bool = False
    saves_itself: bool = True
    asked_at: float | None = None
    saved: int = -1


@dataclass
class Disk:
    """What a machine's disk holds; a new machine has a new one."""

    local: dict[str, Checkpoint] = field(default_factory=dict)
    trained: TrainedNote | None = None
    note: Note = field(default_factory=Note)


@dataclass
class Lease:
    """The lease object. ``silent_since`` is when its holder stopped renewing it, None while he does."""

    holder: int
    epoch: int
    released: bool = False
    silent_since: float | None = None


@dataclass(frozen=True)
class Commit:
    """The last request of an upload that began at ``began``."""

    checkpoint: Checkpoint
    began: float


@dataclass
class Machine:
    """One machine, and the supervisor that lives on it now."""

    name: str
    disk: Disk = field(default_factory=Disk)
    state: State = field(default_factory=State)
    trainer: Trainer | None = None
    life: int = 0
    waiting_since: float | None = None
    frozen_until: float = 0.0
    cut_until: float = 0.0
    told_lost: bool = False
    begun: float = 0.0

    @property
    def lives(self) -> bool:
        return self.life > 0


class BrokenPromise(AssertionError):
    """An invariant does not hold; the message says which, and the history of the world."""


class World:
    """One job, from its first submit to its end, over as many machines as it takes; ``machines`` of them at a time."""

    def __init__(self, seed: int, faults: Faults, policy: Policy | None = None, machines: int = 1) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.left = faults.budget
        self.policy = policy or Policy(upload_every=40.0, max_without_progress=3)
        self.now = 1_000_000.0
        self.stored: dict[str, Checkpoint] = {}
        self.corrupt: set[str] = set()
        self.poisoned: set[str] = set()
        self.done = False
        self.lease: Lease | None = None
        self.highest_attempt = 0
        self.finished_step: int | None = None
        self.machines = [Machine(f"m{number}") for number in range(machines)]
        self.queue: list[tuple[float, int, Machine, int, Event | str | Commit]] = []
        self.ticket = 0
        self.lives = 0
        self.log: list[str] = []
        self.serial = 0
        self.ending: Ending | None = None
        self.takeovers = 0
        self.stale: set[str] = set()
        self.freed_at: float | None = None
        self.seen = no_lives()
        self.asked = 0

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, most_lives: int = 400) -> Ending:
        """Submit again and again, as a scheduler would, until the job is done or has failed for good."""
        for number, machine in enumerate(self.machines):
            self.post(machine, self.random.uniform(0.0, 300.0) * number, "submit")
        turns = 0
        while self.ending is None or (self.ending.exit_code == 0 and any(one.lives for one in self.machines)):
            self.turn()
            turns += 1
            if self.lives > most_lives * len(self.machines) or turns > 500_000:
                self.broken("the job does not end")
        return self.ending

    def turn(self) -> None:
        """The next thing that happens, wherever."""
        due, waker = min(
            ((max(wake_at(self.policy, one.state), one.frozen_until), one) for one in self.machines if one.lives),
            key=lambda pair: pair[0],
            default=(math.inf, None),
        )
        if self.queue and self.queue[0][0] <= due:
            at, _, machine, life, thing = heapq.heappop(self.queue)
        elif waker is not None and due < math.inf:
            at, machine, life, thing = due, waker, waker.life, on.Woke()
        else:
            self.broken("nothing will ever happen")
        if at < self.now and isinstance(thing, on.Woke):
            self.broken("asked to wake in the past")
        self.now = max(self.now, at)
        if life == machine.life:
            self.happen(machine, thing)

    def happen(self, machine: Machine, thing: Event | str | Commit) -> None:
        if machine.frozen_until > self.now:
            self.post(machine, machine.frozen_until - self.now, thing)
        elif isinstance(thing, str):
            self.step(machine, self.outside(machine, thing))
        elif isinstance(thing, Commit):
            self.commit(machine, thing.checkpoint, thing.began)
        else:
            self.step(machine, thing)

    def step(self, machine: Machine, event: Event | None) -> None:
        if event is None:
            return
        before = machine.state
        machine.state, actions = decide(self.policy, machine.state, event, self.now)
        phase = type(machine.state.phase).__name__
        self.log.append(f"{self.now:.0f} {machine.name} {event} -> {phase} {[type(a).__name__ for a in actions]}")
        has_slept = machine.frozen_until == self.now and not isinstance(event, on.Woke)
        if wake_at(self.policy, machine.state) <= self.now and not has_slept:
            self.broken("wants to wake at once: a loop that spins")
        if decide(self.policy, before, event, self.now) != (machine.state, actions):
            self.broken("decide is not a function")
        for action in actions:
            self.perform(machine, action)
        if machine.lives and isinstance(machine.state.phase, Finished):
            self.leave(machine, machine.state.phase.ending)

    # -- lives ---------------------------------------------------------------------------------------------------------

    def submit(self, machine: Machine) -> Event:
        self.lives += 1
        machine.life, machine.state, machine.trainer = self.lives, State(), None
        machine.waiting_since, machine.told_lost, machine.begun = None, False, self.now
        if self.faults.lives and self.happens(1.0):
            self.post(machine, self.random.expovariate(1.0 / self.random.choice(self.faults.lives)), "die")
        for chance, latest, thing in (
            (self.faults.kill_supervisor, 1500.0, "die"),
            (self.faults.notice, 900.0, "notice"),
            (self.faults.stop, 900.0, "stop"),
            (self.faults.freeze, 900.0, "freeze"),
            (self.faults.cut, 900.0, "cut"),
        ):
            if self.happens(chance):
                self.post(machine, self.random.uniform(0.0, latest), thing)
        return on.Started()

    def die(self, machine: Machine) -> None:
        """The supervisor was killed, or its machine vanished."""
        self.log.append(f"{self.now:.0f} {machine.name} is dead")
        self.seen = with_life(self.seen, 0.0, self.now - machine.begun, lost=True)
        if self.holds(machine):
            self.fall_silent()
        if self.chance(self.faults.new_machine):
            machine.disk = Disk()
        self.end_life(machine)

    def leave(self, machine: Machine, ending: Ending) -> None:
        if machine.trainer is not None:
            self.broken("left while the trainer runs")
        self.release(machine)
        if ending.exit_code in ASK_AGAIN:
            self.end_life(machine)
            return
        if self.ending is not None and ending.exit_code != 0:
            self.broken(f"the job is done, and a standby says {ending}")
        self.check_end(machine, ending)
        self.ending = ending
        machine.life = 0

    def end_life(self, machine: Machine) -> None:
        machine.life, machine.trainer = 0, None
        machine.state = State()
        if self.ending is None:
            self.post(machine, 30.0, "submit")

    # -- the lease -----------------------------------------------------------------------------------------------------

    def holds(self, machine: Machine) -> bool:
        """The truth, whatever the machine believes."""
        lease = self.lease
        return lease is not None and machine.lives and lease.holder == machine.life and not lease.released

    def fall_silent(self) -> None:
        assert self.lease is not None
        if self.lease.silent_since is None:
            self.lease.silent_since = self.freed_at = self.now

    def release(self, machine: Machine) -> None:
        if self.holds(machine) and machine.cut_until <= self.now:
            assert self.lease is not None
            self.lease.released = True
            self.freed_at = self.now
        elif self.holds(machine):
            self.fall_silent()

    def ask(self, machine: Machine) -> Event | None:
        """As a candidate: the lease if it is free; else look again after a while."""
        lease = self.lease
        if machine.cut_until > self.now:
            self.post(machine, LOOK, "look")
            return None
        since = machine.waiting_since
        machine.waiting_since = self.now if since is None else since
        silent = lease.silent_since if lease else None
        expired = silent is not None and self.now - max(silent, machine.waiting_since) >= 0.85 * PERIOD
        own = lease is not None and str(lease.holder) == machine.disk.note.holder
        if lease is None or lease.released or own or expired:
            return self.take(machine, expired=expired and not own)
        self.post(machine, LOOK, "look")
        return on.LeaseHeld(str(lease.holder), "other", lease.epoch, self.now) if since is None else None

    def take(self, machine: Machine, *, expired: bool) -> Event:
        if self.lease is not None and self.freed_at is not None and machine.waiting_since is not None:
            away_until = max(machine.frozen_until, machine.cut_until)
            late = self.now - max(self.freed_at, machine.waiting_since, away_until)
            if late > (PERIOD if expired else 5.0):
                self.broken(f"a takeover after {late:.1f} s")
            self.takeovers += 1
        self.lease = Lease(machine.life, self.lease.epoch + 1 if self.lease else 1)
        self.freed_at = machine.waiting_since = None
        machine.told_lost = False
        machine.disk.note = replace(machine.disk.note, holder=str(machine.life))
        return on.LeaseTaken(str(machine.life), machine.name, self.lease.epoch)

    def tell_of_loss(self, machine: Machine) -> Event | None:
        """The holder finds that it is none any more."""
        believes = machine.state.ledger.lease is not None and machine.state.ledger.lease.ours
        if not machine.lives or not believes or self.holds(machine) or machine.told_lost:
            return None
        machine.told_lost = True
        return on.LeaseLost("another machine has taken over")

    def freeze(self, machine: Machine) -> None:
        machine.frozen_until = self.now + self.random.choice([5.0, 20.0, 40.0, 120.0, 600.0])
        if self.holds(machine):
            self.fall_silent()
        self.post(machine, machine.frozen_until - self.now, "back")

    def cut(self, machine: Machine) -> None:
        machine.cut_until = self.now + self.random.choice([5.0, 20.0, 40.0, 120.0, 600.0])
        if self.holds(machine):
            self.fall_silent()
            self.post(machine, 0.75 * PERIOD, "unrenewed")
        self.post(machine, machine.cut_until - self.now, "back")

    def unrenewed(self, machine: Machine) -> Event | None:
        """Somebody waits, and will soon take over: the holder does not wait for that."""
        waits = any(one.lives and one.waiting_since is not None for one in self.machines if one is not machine)
        believes = machine.state.ledger.lease is not None and machine.state.ledger.lease.ours
        if machine.cut_until <= self.now or not waits or not believes or machine.told_lost:
            return None
        machine.told_lost = True
        return on.LeaseLost("the lease could not be renewed")

    def back(self, machine: Machine) -> Event | None:
        if max(machine.frozen_until, machine.cut_until) > self.now:
            return None
        if self.holds(machine) and not machine.told_lost:
            assert self.lease is not None
            self.lease.silent_since = self.freed_at = None
            return None
        self.post(machine, self.random.uniform(0.0, 3.0), "lost")
        return None

    # -- what the outside does -----------------------------------------------------------------------------------------

    def outside(self, machine: Machine, thing: str) -> Event | None:  # noqa: C901 - one arm per thing
        match thing:
            case "submit":
                return self.submit(machine) if self.ending is None else None
            case "die":
                self.die(machine)
            case "look":
                return self.ask(machine)
            case "lost":
                return self.tell_of_loss(machine)
            case "freeze":
                self.freeze(machine)
            case "cut":
                self.cut(machine)
            case "back":
                return self.back(machine)
            case "unrenewed":
                return self.unrenewed(machine)
            case "stop":
                return self.stop(machine)
            case "notice":
                return self.notice(machine)
            case "withdraw":
                return on.NoticeWithdrawn("cloud")
            case _:
                return self.train(machine, thing)
        return None

    def stop(self, machine: Machine) -> Event:
        person = self.random.random() < 0.5
        ending = Ending("stopped", 143, "stop") if person else Ending("preempted", 75, "SIGTERM")
        if self.random.random() < 0.3:
            self.post(machine, self.random.uniform(0.0, 40.0), "stop")
        return on.StopRequested(ending, now=self.random.random() < 0.2)

    def notice(self, machine: Machine) -> Event:
        lead = self.random.choice([5.0, 30.0, 120.0, 300.0])
        if self.random.random() < self.faults.withdraw:
            self.post(machine, self.random.uniform(1.0, lead), "withdraw")
        else:
            self.post(machine, lead, "die")
        return on.NoticeReceived("cloud", self.now + lead, "the cloud takes it")

    def train(self, machine: Machine, thing: str) -> Event | None:
        """The trainer's own clockwork. ``thing`` is ``<what> <attempt>``."""
        what, attempt = thing.split()
        trainer = machine.trainer
        if trainer is None or trainer.attempt != int(attempt):
            return None
        if what == "exit143":
            return self.exit(machine, 143)
        if what == "save":
            self.save(machine, trainer)
            return self.exit(machine, self.random.choice([0, 143]))
        if trainer.hung:
            return None
        if what == "asked":
            self.answer(machine, trainer)
            return None
        if self.happens(self.faults.hang):
            trainer.hung = True
            self.post(machine, 60.0, on.TrainerHung(trainer.attempt, "no progress"))
            return None
        if self.happens(self.faults.crash):
            return self.exit(machine, self.random.choice([1, -9, -11]))
        trainer.step = min(trainer.step + 1, LAST_STEP)
        last = trainer.step >= LAST_STEP
        if (last or (trainer.saves_itself and trainer.step % SAVE_EVERY == 0)) and trainer.step != trainer.resumed:
            self.save(machine, trainer)
        if last:
            self.finished_step = trainer.step
            return self.exit(machine, 0)
        self.post(machine, STEP_SECONDS, f"step {trainer.attempt}")
        self.check_asked(machine, trainer)
        loss = 5.0 - 0.01 * trainer.step + self.random.uniform(-0.1, 0.1)
        return on.Progressed(trainer.attempt, trainer.step, LAST_STEP, 0.1, loss)

    def answer(self, machine: Machine, trainer: Trainer) -> None:
        """The save that was asked for: half of the time without a word on what it cost."""
        if self.random.random() < 0.5:
            self.save(machine, trainer)
        else:
            self.save(machine, trainer, stall=STALL, persist=PERSIST)

    def save(self, machine: Machine, trainer: Trainer, *, stall: float | None = None, persist: float = 0.0) -> None:
        self.serial += 1
        trainer.saved, trainer.asked_at = trainer.step, None
        name = f"step-{trainer.step}"
        checkpoint = Checkpoint(
            f"local:{name}", trainer.step, name, trainer.attempt, 1, 100, f"s{self.serial}", self.now
        )
        machine.disk.local[name] = checkpoint
        self.step(machine, on.CheckpointSaved(trainer.attempt, checkpoint, stall=stall, persist=persist))

    def exit(self, machine: Machine, code: int) -> Event:
        trainer = machine.trainer
        assert trainer is not None
        machine.trainer = None
        return on.TrainerExited(trainer.attempt, code)

    # -- what actions do -----------------------------------------------------------------------------------------------

    def perform(self, machine: Machine, action: Action) -> None:  # noqa: C901, PLR0912 - one arm per action
        match action:
            case do.TakeLease():
                machine.waiting_since = None
                event = self.ask(machine)
                if event is not None:
                    self.post(machine, 0.5, event)
            case do.ReleaseLease():
                self.release(machine)
            case do.Recover():
                self.recover(machine)
            case do.Prepare(attempt):
                self.highest_attempt = max(self.highest_attempt, attempt)
                self.post(machine, 20.0, on.Prepared(attempt))
            case do.Restore(attempt, checkpoint):
                self.restore(machine, attempt, checkpoint)
            case do.StartTrainer(attempt, resume, _):
                self.start(machine, attempt, resume)
            case do.SignalTrainer(attempt, to):
                self.signal(machine, attempt, to)
            case do.KillTrainer(attempt):
                if machine.trainer is not None and machine.trainer.attempt == attempt:
                    self.post(machine, 0.1, self.exit(machine, -9))
            case do.Upload(checkpoint):
                self.upload(machine, checkpoint)
            case do.Prune(verdicts):
                self.prune(machine, tuple(id_ for id_, _ in verdicts))
            case do.NoteTrained(signature):
                machine.disk.trained = TrainedNote(signature)
            case do.MarkDone():
                self.mark_done(machine)
            case do.AskSave(attempt):
                self.ask_save(machine, attempt)
            case do.AnnounceStop() | do.WarmUp() | do.Warn():
                pass

    def ask_save(self, machine: Machine, attempt: int) -> None:
        trainer = machine.trainer
        if trainer is None or trainer.attempt != attempt:
            return
        if not trainer.askable or trainer.signalled:
            self.broken("asked a trainer that cannot be asked, or that was told to stop")
        if trainer.asked_at is not None and self.now - trainer.asked_at < LEAST_PATIENCE:
            self.broken("asked again, impatiently")
        self.asked += 1
        trainer.asked_at = self.now
        if not trainer.deaf:
            self.post(machine, self.random.uniform(0.0, STEP_SECONDS), f"asked {attempt}")

    def is_refused(self, machine: Machine) -> bool:
        """The fence: by its own clock the machine cannot be sure of the lease, or the store cannot be reached."""
        return machine.cut_until > self.now or not self.holds(machine) or machine.told_lost

    def recover(self, machine: Machine) -> None:
        if self.happens(self.faults.recover_fails):
            self.post(machine, 60.0, on.RecoverFailed("the store is away", 75))
            return
        disk, stored = machine.disk, tuple(self.stored.values())
        rejected: tuple[Rejected, ...] = ()
        if self.corrupt and self.random.random() < 0.3:
            bad = self.random.choice(sorted(self.corrupt))
            rejected = (Rejected(bad, None, "an object is missing"),)
            stored = tuple(one for one in stored if one.id != bad)
        signatures = {one.signature for one in stored}
        local = tuple(one for one in disk.local.values() if one.signature not in signatures)
        local = with_epochs(local, disk.note, stored)
        epoch = max(self.lease.epoch if self.lease else 0, *(one.epoch + 1 for one in stored), 0)
        base = max((place(one) for one in (*stored, *local)), default=(0, -1))
        disk.note = Note(str(machine.life), "", epoch, base, {one.signature: one.epoch for one in local})
        trained = disk.trained is not None and still_holds(disk.trained, (*local, *stored))
        self.post(
            machine,
            1.0,
            on.Recovered(
                1, self.highest_attempt, stored, local, rejected, self.done, trained, epoch, History(self.seen)
            ),
        )

    def restore(self, machine: Machine, attempt: int, checkpoint: Checkpoint) -> None:
        local = checkpoint.id.startswith("local:")
        good = checkpoint.id not in self.corrupt and (local or checkpoint.id in self.stored)
        if good:
            self.post(machine, 5.0, on.Restored(attempt, checkpoint.id, f"/c/{checkpoint.name}"))
        else:
            self.post(machine, 5.0, on.CheckpointRejected(attempt, checkpoint.id, "a digest does not match"))

    def start(self, machine: Machine, attempt: int, resume: Checkpoint | None) -> None:
        if machine.trainer is not None:
            self.broken("two trainers on one machine")
        if self.ending is not None and not self.has_just_come_back(machine):
            self.broken("trains although the job is done")
        self.check_alone(machine)
        self.check_resume(machine, resume)
        self.highest_attempt = max(self.highest_attempt, attempt)
        over = resume is not None and self.happens(self.faults.start_over)
        begin = resume.step if resume and not over else 0
        machine.trainer = Trainer(attempt, begin, deaf=self.random.random() < self.faults.deaf)
        machine.trainer.resumed = machine.trainer.saved = begin if resume else -1
        self.post(machine, 0.5, on.TrainerStarted(attempt, 42, "python train.py"))
        if self.chance(self.faults.askable):
            machine.trainer.askable, machine.trainer.saves_itself = True, self.chance(0.5)
            self.post(machine, 1.0, on.TrainerJoined(attempt))
        if resume is not None and resume.signature in self.poisoned:
            self.post(machine, 3.0, f"exit143 {attempt}")
        else:
            self.post(machine, STEP_SECONDS, f"step {attempt}")

    def signal(self, machine: Machine, attempt: int, to: str) -> None:
        trainer = machine.trainer
        if trainer is None or trainer.attempt != attempt or trainer.deaf or trainer.hung:
            return
        if to == "group":
            self.post(machine, 0.1, f"exit143 {attempt}")
        elif not trainer.signalled:
            trainer.signalled = True
            self.post(machine, self.random.uniform(0.0, 60.0), f"save {attempt}")

    def upload(self, machine: Machine, checkpoint: Checkpoint) -> None:
        seconds = self.random.uniform(1.0, 60.0)
        if self.happens(self.faults.upload_hopeless):
            self.post(machine, 1.0, on.UploadFailed(checkpoint.id, "access denied", retryable=False))
        elif self.happens(self.faults.upload_fails):
            gone = checkpoint.step != LAST_STEP and self.random.random() < 0.3
            if gone:
                machine.disk.local.pop(checkpoint.name, None)
            self.post(machine, seconds, on.UploadFailed(checkpoint.id, "the store refuses", gone=gone))
        else:
            self.post(machine, seconds, Commit(checkpoint, self.now))

    def commit(self, machine: Machine, checkpoint: Checkpoint, began: float) -> None:
        """The manifest is written; the news of it may come too late."""
        if machine.cut_until > self.now or (self.is_refused(machine) and not self.happens(self.faults.straggle)):
            self.step(machine, on.UploadFailed(checkpoint.id, "the lease is in doubt"))
            return
        self.serial += 1
        stored = replace(checkpoint, id=f"step-{checkpoint.step:03d}.a{checkpoint.attempt}-{self.serial}", time=began)
        if not self.holds(machine):
            self.stale.add(stored.id)
            self.log.append(f"{self.now:.0f} {machine.name} commits {place(stored)} although it has lost the lease")
        elif self.lease is not None and stored.epoch > self.lease.epoch:
            self.broken("a commit under an epoch that is nobody's")
        if self.happens(self.faults.corrupt):
            self.corrupt.add(stored.id)
        elif self.happens(self.faults.poison):
            self.poisoned.add(stored.signature)
        self.stored[stored.id] = stored
        self.post(machine, self.random.uniform(0.0, 5.0), on.Uploaded(checkpoint.id, stored, 10.0))

    def prune(self, machine: Machine, ids: tuple[str, ...]) -> None:
        if self.is_refused(machine) or self.happens(self.faults.upload_fails):
            self.post(machine, 2.0, on.Pruned(ids, "the store refuses"))
            return
        for id_ in ids:
            self.stored.pop(id_, None)
        self.post(machine, 2.0, on.Pruned(ids))
        bad = machine.state.ledger.rejected
        known_bad = {rejected.id for rejected in bad} | {rejected.signature for rejected in bad}
        if all({one.id, one.signature} & known_bad for one in self.stored.values()):
            self.broken("retention left no checkpoint that is not known to be bad")

    def mark_done(self, machine: Machine) -> None:
        if self.is_refused(machine) or self.happens(self.faults.upload_fails):
            self.post(machine, 2.0, on.DoneNotMarked("the store refuses"))
        else:
            self.done = True
            self.post(machine, 1.0, on.DoneMarked())

    # -- promises ------------------------------------------------------------------------------------------------------

    def good(self) -> list[Checkpoint]:
        bad = self.corrupt
        return [one for one in self.stored.values() if one.id not in bad and one.signature not in self.poisoned]

    def check_asked(self, machine: Machine, trainer: Trainer) -> None:
        """A trainer that answers has never trained for longer than the cadence says without a save."""
        cadence = machine.state.ledger.cadence
        if not trainer.askable or trainer.deaf or trainer.signalled or cadence is None:
            return
        worked = (trainer.step - max(trainer.saved, 0)) * STEP_SECONDS
        if worked > cadence.save_every + 5 * STEP_SECONDS:
            self.broken(f"{worked} s of training without a save, and nobody asked for one")

    def check_alone(self, machine: Machine) -> None:
        """A second trainer runs only where its supervisor has not heard yet that it lost the lease."""
        if not self.holds(machine) and not self.has_just_come_back(machine):
            self.broken("a trainer is started without the lease")
        for other in self.machines:
            excused = self.has_just_come_back(other) or other.told_lost
            if other is not machine and other.trainer is not None and self.holds(machine) and not excused:
                self.broken("two machines train")

    def has_just_come_back(self, machine: Machine) -> bool:
        """It cannot have heard of what went on meanwhile; or it is still away."""
        return max(machine.frozen_until, machine.cut_until) > self.now - 3.0

    def check_resume(self, machine: Machine, resume: Checkpoint | None) -> None:
        """Never from older than the newest known, never silently from the beginning."""
        bad = machine.state.ledger.rejected
        set_aside = {rejected.id for rejected in bad} | {rejected.signature for rejected in bad}
        known = {one.id for one in machine.state.ledger.stored}
        best = max(
            (place(one) for one in self.good() if one.id in known and not {one.id, one.signature} & set_aside),
            default=(0, -1),
        )
        have = place(resume) if resume else (0, -1)
        if have < best:
            self.broken(f"resumed at {have} although {best} is stored and good")
        best_known = next(iter(usable(machine.state.ledger)), None)
        if best_known is not None and (resume is None or resume.signature != best_known.signature):
            self.broken("resumed from older than the newest known")
        faults = self.faults
        if not (self.stale or faults.crash or faults.poison or faults.corrupt or faults.hang):
            highest = max((one.step for one in self.good() if one.id in known), default=-1)
            if have[1] < highest:
                self.broken(f"step {highest} is stored and good, and what a trainer that started over saved beat it")
        unknown = [one for one in self.good() if one.id not in known and one.epoch < machine.state.ledger.epoch]
        if self.holds(machine) and any(place(one) > have and one.id not in self.stale for one in unknown):
            self.broken("a checkpoint that was stored in time is not known")

    def check_end(self, machine: Machine, ending: Ending) -> None:
        if ending.exit_code == 0:
            if self.finished_step != LAST_STEP or not self.done:
                self.broken("success although training has not finished")
            if all(one.step != LAST_STEP for one in self.stored.values()):
                self.broken("success although the last checkpoint is not stored")
        elif ending.exit_code == 73 and all(one.step != LAST_STEP for one in machine.disk.local.values()):
            self.broken("the last checkpoint is neither stored nor on the disk")

    def broken(self, what: str) -> NoReturn:
        raise BrokenPromise(what + "\n" + "\n".join(self.log[-80:]))

    # -- dice ----------------------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def happens(self, probability: float) -> bool:
        """A fault, while there are any left."""
        if self.left <= 0 or not self.chance(probability):
            return False
        self.left -= 1
        return True

    def post(self, machine: Machine, delay: float, thing: Event | str | Commit) -> None:
        self.ticket += 1
        life = machine.life
        heapq.heappush(self.queue, (self.now + delay, self.ticket, machine, life, thing))
