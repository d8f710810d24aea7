"""Ultralytics: ``weights/last.pt``, written in place at every epoch, and without an optimizer at the very end."""

from __future__ import annotations

from runner.checkpoint.formats.entry import Entry, Format, Proof
from runner.checkpoint.formats.faults import NoCheckpointError

_OWN_WORDS = (b"ultralytics", b"train_args")
FINISHED = -1


class Ultralytics(Format):
    """A whole torch file. The step is the epoch, counted from 0 as Ultralytics does."""

    name = "ultralytics"

    def claims(self, entry: Entry) -> bool:
        return not entry.is_dir and all(word in entry.content.pickle for word in _OWN_WORDS)

    def check(self, entry: Entry) -> Proof:
        if entry.content.number("epoch") == FINISHED:
            raise NoCheckpointError(
                "is of a finished run: its optimizer was taken out, so nothing can be resumed from it"
            )
        return Proof.WHOLE

    def step(self, entry: Entry) -> int | None:
        return entry.content.number("epoch")
