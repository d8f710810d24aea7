"""The Transformers Trainer: ``checkpoint-12/``, in which rank 0 writes ``trainer_state.json`` last."""

from __future__ import annotations

import re

from runner.checkpoint.formats.dcp import check_shards, ranks_of_shards
from runner.checkpoint.formats.deepspeed import check_states, ranks_of_states
from runner.checkpoint.formats.entry import Entry, Format, Proof, read_json, whole_number
from runner.checkpoint.formats.faults import BrokenError
from runner.checkpoint.formats.ranks import check_index, check_ranks

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_SILENTLY_NEW = (
    (re.compile(r"optimizer(_\d+)?(\.pt|\.bin|/\.metadata)|.*_states\.pt"), "optimizer"),
    (re.compile(r"rng_state(_\d+)?\.pth"), "random state"),
)


class Transformers(Format):
    """Complete with its state, an optimizer, and the random state of every rank."""

    name = "transformers"

    def claims(self, entry: Entry) -> bool:
        if STATE in entry.sizes:
            return True
        return "training_args.bin" in entry.sizes and _NAME.fullmatch(entry.name) is not None

    def check(self, entry: Entry) -> Proof:
        check_index(entry)
        proofs = check_shards(entry), check_states(entry)
        if STATE not in entry.sizes:
            raise BrokenError(f"has no {STATE}, which the trainer writes last")
        self._check_step(entry)
        _check_resumable(entry)
        return min(*proofs, _check_ranks(entry))

    def step(self, entry: Entry) -> int | None:
        return whole_number(read_json(entry.path / STATE).get("global_step"))

    def _check_step(self, entry: Entry) -> None:
        step, named = self.step(entry), _NAME.fullmatch(entry.name)
        if step is None:
            raise BrokenError(f"{STATE} tells no global_step")
        if named and int(named[1]) != step:
            raise BrokenError(f"{STATE} is of step {step}")


def _check_resumable(entry: Entry) -> None:
    """A folder of another name is somebody's final model: nobody resumes from it."""
    missing = [what for pattern, what in _SILENTLY_NEW if not any(pattern.fullmatch(name) for name in entry.sizes)]
    if missing and _NAME.fullmatch(entry.name) and not _saves_model_only(entry):
        raise BrokenError(f"has no {missing[0]}: Transformers would go on with a fresh one and not say so")


def _saves_model_only(entry: Entry) -> bool:
    arguments = entry.contents.get("training_args.bin")
    return arguments is not None and arguments.says("save_only_model")


def _check_ranks(entry: Entry) -> Proof:
    """With several processes each writes its own RNG state, some of them after rank 0 has finished."""
    if not any(member.startswith("rng_state_") for member in entry.sizes):
        return Proof.WHOLE
    told = max(ranks_of_shards(entry), ranks_of_states(entry))
    check_ranks(entry, r"rng_state_(\d+)\.pth", "rng_state_{}.pth", max(told, 2))
    return Proof.WHOLE if told > 1 else Proof.LAST
