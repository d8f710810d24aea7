"""The three lines of a training script: restore, step, stopping.

checkpointer = Checkpointer({"model": model, "optimizer": optimizer, "loader": loader})
start = checkpointer.restore()
for step, batch in zip(range(start, total), checkpointer.endless(loader)):
    ...
    checkpointer.step(loss=loss)
    if checkpointer.stopping:
        break
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from runner.training import folder as on_disk
from runner.training.channel import Channel
from runner.training.digest import Kind
from runner.training.direct import Direct
from runner.training.image import DamagedCheckpoint, Image
from runner.training.loading import TrackedLoader
from runner.training.parts import part_of
from runner.training.ranks import this_process
from runner.training.shared import SharedMemory
from runner.training.snapshot import Occasion, Snapshot, common_state, put_back, size_of, take
from runner.training.state import pack
from runner.training.wishes import Urgency, Wishes

_DEFAULT_CADENCE = timedelta(minutes=5)
_TELL_EVERY_S = 1.0
_MEET_EVERY_S = 0.5
_MOST_STEPS_BETWEEN_MEETINGS = 64
_NONE_SAVED = -1
_NONE_WHOLE = -2


class Destination(Protocol):
    """A place where snapshots are safe."""

    def save(
        self, image: Image, meta: bytes, step: int, asked: bool, shards: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Take this rank's snapshot, and its part of the sharded tensors; every rank calls it for the same step.

        True when it is safe in its care or on the disk. False when it was skipped, which only happens to a save that
        nobody asked for. Raises OSError when it cannot be written.
        """
        ...


class Checkpointer:
    """Saves and restores all that the next step of a training depends on.

    state         by name: what has ``state_dict`` and ``load_state_dict`` (model, optimizer, scheduler, scaler ...), a
                  DataLoader, a torch.Generator, or a dict of plain values; random states come along
    folder        where checkpoints go; default ``CLOUDRUN_CHECKPOINT_DIR``, else ``checkpoints``
    every         steps (int) or time (timedelta) between saves; default: what the supervisor asks for, without one
                  5 minutes
    total         the last step, which is always saved
    keep          how many checkpoints of its own stay on the disk
    per_rank      names in ``state`` of which each rank has one of its own (loaders and generators always are)
    digest        record a digest of the state with each checkpoint ("sampled" or "full"), and compare it at a resume
    stop_signals  signals that mean: save and stop, where the script does not handle them itself

    With several ranks every rank makes one, after ``init_process_group``, and calls its methods at the same points.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        folder: str | os.PathLike[str] | None = None,
        every: int | timedelta | None = None,
        total: int | None = None,
        keep: int = 3,
        per_rank: Collection[str] = (),
        digest: Kind | None = None,
        stop_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        """Raises NotStorable or TypeError, naming the path, for state that no checkpoint can hold."""
        if every in (0, timedelta(0)) or "-" in str(every):
            raise ValueError(f"every is {every}: give a number of steps or a time above zero")
        self._folder = Path(folder or os.environ.get("CLOUDRUN_CHECKPOINT_DIR") or "checkpoints").absolute()
        self._every = every
        self._total = total
        self._digest = digest
        self._ranks = this_process()
        self._parts = {name: part_of(name, thing, own=name in per_rank) for name, thing in state.items()}
        pack(common_state(self._parts), "state")
        self._channel = Channel.connect(self._ranks.rank, self._ranks.world)
        self._wishes = Wishes(self._channel, stop_signals)
        direct = Direct(self._folder, self._ranks, keep, self._channel)
        # The supervisor brings snapshots into the folder that it watches, and no other.
        watched = self._folder == Path(os.environ.get("CLOUDRUN_CHECKPOINT_DIR") or ".").absolute()
        self._memory = SharedMemory(self._channel, direct, self._ranks) if self._channel and watched else None
        self._destination: Destination = self._memory or direct
        self._step = self._began_at = 0
        self._saved_step = -1
        self._has_room = False
        self._urgency = Urgency.NONE
        self._stopping = False
        self._metrics: dict[str, float | Tensor] = {}
        now = time.monotonic()
        self._last_save, self._last_told, self._last_meeting = now, 0.0, now
        self._meeting_step, self._steps_between = 0, 1
        for text in (text for part in self._loaders() for text in part.warnings()):
            self._say(text)

    # ---- the three lines

    def restore(self) -> int:
        """Put everything back from the checkpoint to go on from; returns how many steps are done, 0 without one.

        Under cloudrun that is the one it chose, else the newest whole one in the folder. Call it when everything is
        built and moved to its device, right before the loop. What is not exact about it is said on stderr.
        Raises DamagedCheckpoint or Mismatch; never starts anew when there is something to go on from.
        """
        chosen = self._chosen()
        if chosen is not None:
            said = put_back(self._parts, self._ranks, chosen)
            self._began_at = int(on_disk.check(chosen)["step"])
            self._step = self._saved_step = self._meeting_step = self._began_at
            if said:
                self._say(f"the resume from {chosen.name} may not be exact: {'; '.join(said)}")
            self._make_room()
        return self._step

    def step(self, loss: float | Tensor | None = None, **metrics: float | Tensor) -> None:
        """One optimizer step is done: count it, report it, and save when :attr:`should_save` says so."""
        self.advance(loss, **metrics)
        if self.should_save:
            self._save(self._reason(), asked=self._asked())

    @property
    def stopping(self) -> bool:
        """True when the training is to end: the machine goes, or somebody asked. The state is saved. Leave the loop."""
        return self._stopping

    # ---- for loops that want more

    def advance(self, loss: float | Tensor | None = None, **metrics: float | Tensor) -> None:
        """Like :meth:`step`, without the save."""
        self._step += 1
        if not self._has_room:  # by now the optimizer has made its state
            self._make_room()
        self._metrics = metrics if loss is None else {"loss": loss, **metrics}
        now = time.monotonic()
        self._meet(now)
        self._tell(now)

    @property
    def should_save(self) -> bool:
        """True when a save is due, by the cadence or because somebody asked, and this step is not yet saved."""
        return self._saved_step != self._step and (self._urgency > Urgency.NONE or self._due_by_count())

    def save(self) -> bool:
        """Save now, whatever the cadence says. False when it could not be stored, which is said on stderr."""
        return self._save("called", asked=True)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of one epoch of ``loader``; after a resume, those that are left of it.

        ``loader`` must be part of the state. Samplers and datasets that have ``set_epoch`` are told the epoch.
        """
        return self._tracked(loader).batches()

    def endless(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of ``loader``, epoch after epoch. Raises ValueError for a loader without batches."""
        empty = 0  # the epoch in which a training was resumed may have none left
        while empty < 2:
            empty += 1
            for batch in self.batches(loader):
                empty = 0
                yield batch
        raise ValueError("the data loader has no batches")

    def epoch(self, loader: DataLoader[Any]) -> int:
        """The epoch in which ``loader`` stands, from 0."""
        return self._tracked(loader).epoch

    def close(self) -> None:
        """End the talk with the supervisor. Needed only where a process goes on after its training."""
        if self._channel is not None:
            self._channel.close()

    # ---- saving

    def _save(self, reason: str, *, asked: bool) -> bool:
        if self._saved_step == self._step:
            return True
        self._look_for_unread_loaders()
        snapshot = take(self._parts, self._ranks, Occasion(self._step, reason, self._numbers(), self._digest))
        done = self._store(snapshot, asked)
        self._last_save, self._urgency = time.monotonic(), Urgency.NONE
        if self._channel is not None:
            self._channel.save_made()
        if done:
            self._saved_step = self._step
            if self._channel is not None and self._digest and snapshot.digest:
                self._channel.digest(self._step, snapshot.digest, self._digest)
        return done

    def _look_for_unread_loaders(self) -> None:
        for part in self._loaders():
            if part.way != "stateful" and not part.was_read and self._step > self._began_at:
                part.was_read = True  # said once
                self._say(f"{part.name} was not read through checkpointer.batches(): its place is not known, nor saved")

    def _store(self, snapshot: Snapshot, asked: bool) -> bool:
        """A training that cannot save now goes on: the disk may have room later, and the state is in memory."""
        try:
            return self._destination.save(snapshot.image, snapshot.meta, self._step, asked, snapshot.shards)
        except OSError as error:
            self._say(f"step {self._step} could not be saved, training goes on: {error}", every_rank=True)
            return False

    # ---- when

    def _meet(self, now: float) -> None:
        """Let all ranks agree on what is wanted: a rank that saved or stopped alone would leave the others waiting.

        They meet every half second or so, at steps that all of them know beforehand.
        """
        if self._step < self._meeting_step:
            return
        wish = Urgency.CADENCE if self._due_by_time(now) else Urgency.NONE
        if not self._stopping:  # a loop that goes on all the same must not save at each step
            wish = max(wish, self._wishes.urgency(now))
        urgency, self._steps_between = self._ranks.highest(wish, self._pace(now))
        self._urgency = Urgency(urgency)
        self._stopping = self._stopping or self._urgency == Urgency.STOP
        self._last_meeting, self._meeting_step = now, self._step + self._steps_between

    def _pace(self, now: float) -> int:
        """Steps until the next meeting. It grows slowly, since steps may become slow at any time."""
        if self._ranks.world == 1:
            return 1
        quick = now - self._last_meeting < _MEET_EVERY_S
        wanted = self._steps_between * 2 if quick else self._steps_between // 2
        return min(max(wanted, 1), _MOST_STEPS_BETWEEN_MEETINGS)

    def _due_by_count(self) -> bool:
        last = self._step == self._total
        return last or (isinstance(self._every, int) and self._step % self._every == 0)

    def _due_by_time(self, now: float) -> bool:
        """Without a cadence of its own, a training that has a supervisor waits to be asked."""
        asked = self._channel is not None and self._channel.alive
        if isinstance(self._every, int) or (self._every is None and asked):
            return False
        return now - self._last_save >= (self._every or _DEFAULT_CADENCE).total_seconds()

    def _asked(self) -> bool:
        return self._urgency >= Urgency.ASKED or self._step == self._total

    def _reason(self) -> str:
        if self._urgency > Urgency.CADENCE:
            return self._urgency.name.lower()
        return "end" if self._step == self._total else "cadence"

    # ---- the rest

    def _chosen(self) -> Path | None:
        """The checkpoint to go on from. A supervisor's choice is followed, also when it chose none."""
        told = os.environ.get("CLOUDRUN_RESUME_FROM")
        if told is not None:
            return Path(told) if told else None
        step = self._ranks.first_says(self._newest_step() if self._ranks.rank == 0 else _NONE_SAVED)
        if step == _NONE_WHOLE:
            raise DamagedCheckpoint(f"no checkpoint in {self._folder} is whole. Move them away to start anew.")
        return None if step == _NONE_SAVED else self._folder / on_disk.folder_name(step)

    def _newest_step(self) -> int:
        saved = on_disk.saved_in(self._folder)
        for folder in reversed(saved):
            try:
                return int(on_disk.check(folder)["step"])
            except DamagedCheckpoint as error:
                self._say(f"passed over: {error}")
        return _NONE_WHOLE if saved else _NONE_SAVED

    def _tell(self, now: float) -> None:
        """Progress, at most once a second: reading a loss waits for the device."""
        if self._channel is None or (now - self._last_told < _TELL_EVERY_S and self._step != self._total):
            return
        self._last_told = now
        self._channel.progress(self._step, self._total, self._numbers().get("loss"))

    def _numbers(self) -> dict[str, float]:
        """What JSON can hold of the metrics: a loss that is no number is left out."""
        numbers = {name: _number(value) for name, value in self._metrics.items()}
        return {name: number for name, number in numbers.items() if math.isfinite(number)}

    def _make_room(self) -> None:
        self._has_room = True
        if self._memory is not None:
            self._memory.prepare(size_of(self._parts, self._ranks))

    def _tracked(self, loader: DataLoader[Any]) -> TrackedLoader:
        for part in self._loaders():
            if part.loader is loader:
                return part
        raise ValueError(
            "this DataLoader is not part of the Checkpointer's state: add it, so that its position is saved"
        )

    def _loaders(self) -> list[TrackedLoader]:
        return [part for part in self._parts.values() if isinstance(part, TrackedLoader)]

    def _say(self, text: str, *, every_rank: bool = False) -> None:
        """For a person: on stderr, and to the supervisor's journal."""
        if self._ranks.rank == 0 or every_rank:
            sys.stderr.write(f"runner.training: {text}\n")
            sys.stderr.flush()
            if self._channel is not None:
                self._channel.remark(text)


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
