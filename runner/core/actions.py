"""Orders: what the executor is to do. Each is answered by an event, unless it says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.core.state import Alarm, Checkpoint

Recipient = Literal["ranks", "group"]


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Ask for the lease until it is ours. Answer: LeaseTaken, after any number of LeaseHeld; or RecoverFailed."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """While another machine runs the job, bring the data into the cache. No answer."""


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Let another machine take over at once. No answer."""


@dataclass(frozen=True, slots=True)
class Recover:
    """Ask the store and the disk what exists. Answer: Recovered or RecoverFailed."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Run setup, bring the data. Answer: Prepared or PrepareFailed."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring the checkpoint to the disk and verify it. Answer: Restored, CheckpointRejected or PrepareFailed."""

    attempt: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Start the command. Answer: TrainerStarted, and at its end TrainerExited."""

    attempt: int
    resume: Checkpoint | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class SignalTrainer:
    """Send a signal: the spec's stop signal to the ranks, or SIGTERM to the whole group. No answer."""

    attempt: int
    to: Recipient


@dataclass(frozen=True, slots=True)
class KillTrainer:
    """End everything that descends from the trainer, by force. No answer but TrainerExited."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AnnounceStop:
    """Write the stop file, for trainers that look: the machine goes at ``deadline``. No answer."""

    attempt: int
    deadline: float


@dataclass(frozen=True, slots=True)
class AskSave:
    """Ask the trainer to save and go on: over the socket, or by the owner's signal. Answer, in time: CheckpointSaved.

    deadline   epoch seconds at which the save should be stored, where there is a haste; else None
    """

    attempt: int
    reason: str
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the owner of something new that he should look at. No answer."""

    alarm: Alarm


@dataclass(frozen=True, slots=True)
class Upload:
    """Commit a local checkpoint to the store. Answer: Uploaded or UploadFailed."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete stored checkpoints, each with the reason why it goes. Answer: Pruned."""

    verdicts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NoteTrained:
    """Remember on this disk that training has ended, so that it is never done twice. No answer.

    signature   of the newest checkpoint: only while that one is known does the note hold; None when there is none
    """

    signature: str | None


@dataclass(frozen=True, slots=True)
class MarkDone:
    """Mark the run as finished in the store. Answer: DoneMarked or DoneNotMarked."""


Action = (
    TakeLease
    | WarmUp
    | ReleaseLease
    | Recover
    | Prepare
    | Restore
    | StartTrainer
    | SignalTrainer
    | KillTrainer
    | AnnounceStop
    | AskSave
    | Warn
    | Upload
    | Prune
    | NoteTrained
    | MarkDone
)
