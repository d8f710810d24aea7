"""For the Transformers Trainer: ``Trainer(..., callbacks=[CloudrunCallback()])``.

Progress for the supervisor, a checkpoint when it asks for one, and the end of the training when the machine goes. The
checkpoints are the Trainer's own, and so is what they hold: it finds its place in the data again by itself, and the
resume is exact when what is random about a sample follows from its index (see :class:`.SeededDataset`).
"""

# ruff: noqa: ARG002 (a hook's arguments are the library's)
from __future__ import annotations

import os
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from runner.training.following import Following
from runner.training.wishes import Urgency


class CloudrunCallback(TrainerCallback):
    """Without a supervisor it does nothing but to look for ``CLOUDRUN_STOP_FILE``."""

    def __init__(self) -> None:
        self._following: Following | None = None
        self._loss: float | None = None
        self._asked_at = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._following = Following()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._following is not None
        loss = None if self._loss is None else float(self._loss)
        urgency = self._following.step(state.global_step, state.max_steps, loss)
        self._asked_at = time.monotonic()
        if urgency > Urgency.NONE:
            control.should_save = True
        if urgency == Urgency.STOP:
            control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._following is not None
        path = os.path.abspath(os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}"))
        self._following.saved(path, state.global_step, time.monotonic() - self._asked_at)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._following is not None:
            self._following.close()
