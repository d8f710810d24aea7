"""Where a job stands: one frozen class per phase, and the ledger of facts that outlives phases.

Waiting ──> Preparing ──> Running ──> Stopping ──> Flushing ──> Finished
                ^            │            │            │
                └─ BackingOff┘ <──────────┘            └─> Holding ──> Preparing (notice withdrawn)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["succeeded", "failed", "stalled", "preempted", "stopped"]


@dataclass(frozen=True, slots=True)
class Environment:
    """What the bits of a training depend on beside its state; None where nobody knows.

    world     ranks that train together
    threads   threads of each rank's arithmetic
    cpu       the instruction set that it picks its kernels by, such as ``AVX512``
    """

    world: int | None = None
    threads: int | None = None
    cpu: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint: saved on the local disk, committed in the store, or both.

    id         what people and commands call it: the folder's name in the store (``step-000000001200.a7-3f9c2d``), or
               ``local:<name>`` while it is not stored
    step       the training step it holds
    name       the trainer's own name of the file or folder, relative to the checkpoint folder
    attempt    the attempt that wrote it, 0 where nobody knows
    signature  equal for two checkpoints exactly when paths, sizes and modification times of all files are equal: how a
               local folder and a stored checkpoint are known to be the same without reading them
    time       epoch seconds: of the commit (stored) or of the newest file (local)
    epoch      of the lease under which it was made, 0 where there is none: each holder counts one further. One that is
               behind what its attempt resumed from has that one's epoch: it must not count as newer
    metrics    what the trainer measured at this step, by name
    environment  in which it was made, where that is known
    """

    id: str
    step: int
    name: str
    attempt: int
    files: int
    bytes: int
    signature: str
    time: float
    epoch: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    environment: Environment | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that must not be used, and why. With a ``signature``, all copies of it are meant."""

    id: str
    step: int | None
    reason: str
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How the supervisor leaves, and why."""

    outcome: Outcome
    exit_code: int
    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """After the trainer has stopped: flush, then leave."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Hold:
    """After the trainer has stopped: flush, then wait for the machine's end or the notice's withdrawal."""

    source: str
    deadline: float
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """After the trainer has stopped: start it again."""

    reason: str
    hung: bool = False


# -- phases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing is known yet, the store is being asked; or, with a ``reason``, this machine stands by for another one."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Preparing:
    """Setup, data, restore: what the next attempt needs."""

    since: float
    restoring: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """The trainer runs. ``newest_before`` is the newest step known when it started, -1 for none."""

    since: float
    resumed: Checkpoint | None
    newest_before: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """The trainer was told to stop; at ``until`` the next, harder ``stage`` follows.

    hurried   somebody asked twice, or asked for no save: nothing is waited for afterwards either
    saved     a checkpoint has come since: that one is worth the upload lane, also while the trainer has not gone yet
    """

    running: Running
    aim: Leave | Hold | Restart
    stage: Literal["asked", "terminated", "killed"]
    until: float
    hurried: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Flushing:
    """The trainer has gone; its last checkpoint is on its way.

    At ``give_up_at`` (an upload that moves is not cut, unless ``hurried``) the job ends as ``otherwise``; where that is
    None, as one whose last checkpoint could not be stored.
    """

    aim: Leave | Hold
    since: float
    give_up_at: float
    otherwise: Ending | None = None
    hurried: bool = False


@dataclass(frozen=True, slots=True)
class BackingOff:
    """Waiting before the next attempt."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Holding:
    """All that could be saved is saved; the machine is going, or the notice is withdrawn."""

    notice: Hold


@dataclass(frozen=True, slots=True)
class Finished:
    """The supervisor leaves."""

    ending: Ending


Phase = Waiting | Preparing | Running | Stopping | Flushing | BackingOff | Holding | Finished

PHASE_NAMES: dict[type[Phase], str] = {
    Waiting: "waiting",
    Preparing: "preparing",
    Running: "running",
    Stopping: "stopping",
    Flushing: "flushing",
    BackingOff: "backing_off",
    Holding: "holding",
    Finished: "finished",
}


# -- facts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """The last progress that the trainer reported."""

    step: int
    total: int | None
    rate: float | None
    at: float


@dataclass(frozen=True, slots=True)
class LastStop:
    """Why the trainer last stopped. ``code`` is its exit code, negative for a signal."""

    cause: Literal["exited", "crashed", "hung", "stopped", "preempted"]
    reason: str
    code: int


@dataclass(frozen=True, slots=True)
class Uploads:
    """The one lane on which checkpoints go to the store.

    current    the local checkpoint on its way
    last_at    when the last upload started; ``seconds`` what the last one that succeeded took
    failures   failures since the last success; ``retry_at`` is when to try again, ``problem`` the last reason
    hopeless   the store said no in a way that more tries cannot change
    """

    current: Checkpoint | None = None
    last_at: float | None = None
    seconds: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    problem: str | None = None
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Saves:
    """The trainer's saves, as far as the cadence needs to know them.

    askable    in this attempt the trainer has said that it can be asked for a save
    since      when it first reported a step in this attempt; None: it has nothing to save yet
    asked_at   when it was asked for the save that it has not made yet
    begun_at   when the last save that was completed in this attempt had begun; ``last_at`` when it was complete
    own_every  seconds between its last two saves
    cost       seconds of training that a save costs; None before one was measured
    persist    seconds from the end of the stall until it is complete on the disk
    """

    askable: bool = False
    since: float | None = None
    asked_at: float | None = None
    begun_at: float | None = None
    last_at: float | None = None
    own_every: float | None = None
    cost: float | None = None
    persist: float = 0.0


@dataclass(frozen=True, slots=True)
class Band:
    """Machines between two ages, the upper one being ``until``: seconds that they lived so, and how many were lost."""

    until: float
    seconds: float = 0.0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Trend:
    """A figure over its recent past: how many were told, their mean and variance, the last sixteen or so counting."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0


@dataclass(frozen=True, slots=True)
class History:
    """What earlier supervisors of this run have learned, on machines like this one.

    lives    how long machines lived; empty where nothing is known
    cost, persist, upload   of a save, in seconds, as last measured; None or 0 where unknown
    losses   that the trainer reported last
    """

    lives: tuple[Band, ...] = ()
    cost: float | None = None
    persist: float = 0.0
    upload: float = 0.0
    losses: Trend = Trend()


NO_HISTORY = History()


@dataclass(frozen=True, slots=True)
class Losses:
    """The trainer's losses: the trend ``before`` it was resumed, the ``first`` ones after, and the trend since."""

    before: Trend = Trend()
    first: tuple[float, ...] = ()
    recent: Trend = Trend()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time (epoch seconds) that is known beforehand, and at which the machine or the trainer may end."""

    source: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often to save (a trainer that can be asked) and to upload, in seconds, and why."""

    save_every: float
    upload_every: float
    reason: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that a person should look at while the job goes on."""

    kind: Literal["no checkpoint", "not stored", "loss", "environment"]
    text: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine under this supervisor: since when the supervisor lives, and how old the machine was then."""

    since: float = 0.0
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may run the job and write into its store, as this supervisor last heard.

    ours      this supervisor may; also where the store cannot hold a lease
    holder    the session that holds it, on ``host``; empty while nobody does
    epoch     counts the holders; 0 where the store cannot hold a lease
    standby   hosts of those that wait for it
    lost      why this supervisor has it no more: nothing is written, never again
    """

    ours: bool = False
    holder: str = ""
    host: str = ""
    epoch: int = 0
    standby: tuple[str, ...] = ()
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Facts that outlive phases.

    lease           who may run and write; None before the store was asked
    epoch           under which new checkpoints are made: above that of every earlier holder
    attempt         number of the attempt that runs or comes next
    stored          committed checkpoints of this run
    local           complete checkpoints on this disk that are not stored
    load_failures   per checkpoint's signature, how often the trainer died right after resuming from it
    fruitless       attempts in a row that added no newer checkpoint
    prepared        setup and data are done on this machine
    pruning         stored checkpoints whose deletion is under way; ``prune_due`` that one should be thought of
    reached         the trainer's last word on its progress, in this attempt
    started_over    the trainer was given a checkpoint and reported a step before it
    crashes         ends of the trainer in this session that nobody asked for
    deadlines       known ends of the machine or the trainer, one for each source
    environment     of the trainer that runs
    alarms          what a person should look at, as of the attempt that runs or ran last
    """

    lease: Lease | None = None
    epoch: int = 0
    run: int = 0
    attempt: int = 0
    stored: tuple[Checkpoint, ...] = ()
    local: tuple[Checkpoint, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    uploads: Uploads = Uploads()
    pruning: tuple[str, ...] = ()
    prune_due: bool = False
    resumed: Checkpoint | None = None
    load_failures: tuple[tuple[str, int], ...] = ()
    fruitless: int = 0
    prepared: bool = False
    trained: bool = False
    done: bool = False
    marking: bool = False
    reached: Reached | None = None
    started_over: bool = False
    last_stop: LastStop | None = None
    machine: Machine = Machine()
    history: History = NO_HISTORY
    crashes: int = 0
    saves: Saves = Saves()
    cadence: Cadence | None = None
    deadlines: tuple[Deadline, ...] = ()
    losses: Losses = Losses()
    environment: Environment | None = None
    alarms: tuple[Alarm, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """Everything that ``decide`` knows."""

    phase: Phase = Waiting()
    ledger: Ledger = Ledger()


def age(checkpoint: Checkpoint) -> tuple[int, int, float]:
    """The order of checkpoints: by epoch, then step, then time. Never by time alone.

    The epoch comes first: what a machine commits although another one has taken over must not win by a higher step.
    """
    return checkpoint.epoch, checkpoint.step, checkpoint.time


def place(checkpoint: Checkpoint) -> tuple[int, int]:
    """How far a checkpoint is, whenever it was written: its copy in the store is as far as itself."""
    return checkpoint.epoch, checkpoint.step


def may_write(ledger: Ledger) -> bool:
    """False when the store is another machine's."""
    return ledger.lease is None or ledger.lease.ours


def usable(ledger: Ledger) -> list[Checkpoint]:
    """What could be resumed, best first."""
    return sorted(good((*ledger.stored, *ledger.local), ledger.rejected), key=age, reverse=True)


def is_usable(ledger: Ledger, checkpoint: Checkpoint) -> bool:
    """True while this content can be resumed from, here or in the store."""
    return any(one.signature == checkpoint.signature for one in usable(ledger))


def newest_stored(ledger: Ledger) -> Checkpoint | None:
    """The newest committed checkpoint that is not known to be bad."""
    return max(good(ledger.stored, ledger.rejected), key=age, default=None)


def good(checkpoints: tuple[Checkpoint, ...], rejected: tuple[Rejected, ...]) -> list[Checkpoint]:
    """Those that nothing speaks against."""
    ids = {one.id for one in rejected}
    signatures = {one.signature for one in rejected}
    return [one for one in checkpoints if one.id not in ids and one.signature not in signatures]


def owed(ledger: Ledger) -> Checkpoint | None:
    """The local checkpoint that the store should have and has not: the newest, when it is newer than all stored."""
    best = next(iter(usable(ledger)), None)
    return best if best in ledger.local else None
