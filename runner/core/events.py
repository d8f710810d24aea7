"""Facts: what has happened, as frozen values. A fact does not know its consequences."""

from __future__ import annotations

from dataclasses import dataclass

from runner.core.state import NO_HISTORY, Checkpoint, Ending, Environment, History, Rejected


@dataclass(frozen=True, slots=True)
class Started:
    """The supervisor has begun; always the first event of a session.

    Prices are per hour of this machine, None where nobody knows them. ``session`` is this supervisor's id. ``provider``
    is the kind of machine whose lives are comparable, such as ``aws spot``; empty where nobody knows. ``age`` is how
    many seconds the machine has been up; 0 where nobody knows.
    """

    host: str = ""
    session: str = ""
    version: str = ""
    per_hour: float | None = None
    on_demand_per_hour: float | None = None
    currency: str = "USD"
    monitors: tuple[str, ...] = ()
    provider: str = ""
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that ``wake_at`` asked for has come."""


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """We, session ``holder`` on ``host``, may run the job. ``epoch`` is 0 where the store cannot hold a lease."""

    holder: str
    host: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Another supervisor runs the job, since ``since`` by its own clock; LeaseTaken follows when its time is over.

    With --standby ``holder`` may be empty: nobody has begun the job yet.
    """

    holder: str
    host: str
    epoch: int
    since: float
    standby: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StandbyChanged:
    """These hosts now wait for our lease."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Another supervisor has our lease, or will have it before we can renew it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the store and this machine's disk know of the job.

    epoch     under which this supervisor's checkpoints are made
    attempt   the highest attempt number ever used in this run, 0 for a new one
    local     complete checkpoints on this disk that the store does not have
    done      the run is marked as finished in the store
    trained   an earlier supervisor on this machine saw the training end, but not its last checkpoint stored
    history   what earlier supervisors of the run have learned of machines and saves
    """

    run: int
    attempt: int
    stored: tuple[Checkpoint, ...] = ()
    local: tuple[Checkpoint, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    done: bool = False
    trained: bool = False
    epoch: int = 0
    history: History = NO_HISTORY


@dataclass(frozen=True, slots=True)
class RecoverFailed:
    """The store could not be asked, and trying longer did not help."""

    reason: str
    exit_code: int
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Setup has run and the data is in the cache."""

    attempt: int


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Setup, data or restore cannot be had on this machine; retries are used up or senseless."""

    attempt: int
    reason: str
    exit_code: int
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint lies verified at ``path``."""

    attempt: int
    id: str
    path: str


@dataclass(frozen=True, slots=True)
class CheckpointRejected:
    """The checkpoint cannot be used; the bytes do not match, a file is missing, or it is incomplete."""

    attempt: int
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerStarted:
    """The command runs. ``command`` is its line as a person would type it, secrets redacted."""

    attempt: int
    pid: int
    command: str


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    """The trainer can be asked for a save: all its ranks have said hello on the socket, or the owner named a signal."""

    attempt: int
    environment: Environment | None = None


@dataclass(frozen=True, slots=True)
class Progressed:
    """The trainer has reached ``step`` (of ``total``); ``rate`` is steps per second over the last while."""

    attempt: int
    step: int
    total: int | None = None
    rate: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete on the local disk. Where its name tells no step, ``step_known`` is false.

    stall     seconds for which the trainer stood still, and ``slowdown`` seconds of training lost besides, while it
              was written; None where nobody measured
    persist   seconds from the end of the stall until the checkpoint was complete
    """

    attempt: int
    checkpoint: Checkpoint
    step_known: bool = True
    stall: float | None = None
    slowdown: float | None = None
    persist: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """The trainer has ended and its last checkpoints were reported before: the last event of its attempt.

    code         exit code, negative for a signal
    tail         its last lines of output
    fatal, retry the line that matched one of the owner's patterns, or None
    not_started  why the command could not be started at all, or None
    """

    attempt: int
    code: int
    tail: tuple[str, ...] = ()
    fatal: str | None = None
    retry: str | None = None
    not_started: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerHung:
    """The trainer makes no progress where some is due."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The local checkpoint ``local`` is committed in the store as ``checkpoint``; ``seconds`` is what it took."""

    local: str
    checkpoint: Checkpoint
    seconds: float


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """The upload of the local checkpoint ``local`` came to nothing.

    gone         the files changed or vanished: the trainer's own rotation, not the store's fault
    retryable    false where trying again is senseless, as with access denied
    """

    local: str
    reason: str
    retryable: bool = True
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Pruned:
    """These stored checkpoints are deleted, or deletion failed for ``reason`` and is tried after the next upload."""

    ids: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DoneMarked:
    """The run is marked as finished in the store."""


@dataclass(frozen=True, slots=True)
class DoneNotMarked:
    """The mark could not be written."""

    reason: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants this supervisor to leave as ``ending``. With ``now``, without waiting for a save."""

    ending: Ending
    now: bool = False


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """The cloud will take this machine at ``deadline`` (epoch seconds)."""

    source: str
    deadline: float
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """The notice of ``source`` no longer stands."""

    source: str


@dataclass(frozen=True, slots=True)
class DeadlineKnown:
    """The end of the machine's lease, a limit, a freeze: at ``at`` (epoch seconds). None: ``source`` knows none now."""

    source: str
    at: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class StoreStruggled:
    """A request to the store failed and will be tried again in ``wait`` seconds. For the record."""

    operation: str
    reason: str
    wait: float


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something that a person should read in the record, and that changes no decision."""

    text: str


Event = (
    Started
    | Woke
    | LeaseTaken
    | LeaseHeld
    | StandbyChanged
    | LeaseLost
    | Recovered
    | RecoverFailed
    | Prepared
    | PrepareFailed
    | Restored
    | CheckpointRejected
    | TrainerStarted
    | TrainerJoined
    | Progressed
    | CheckpointSaved
    | TrainerExited
    | TrainerHung
    | Uploaded
    | UploadFailed
    | Pruned
    | DoneMarked
    | DoneNotMarked
    | StopRequested
    | NoticeReceived
    | NoticeWithdrawn
    | DeadlineKnown
    | StoreStruggled
    | Noticed
)
