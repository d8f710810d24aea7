"""DeepSpeed: ``global_step12/`` with the states of every rank, and a text file ``latest`` beside it.

``latest`` proves nothing: rank 0 writes it before the others have finished. But every file of model states tells how
many ranks there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runner.checkpoint.formats.entry import Entry, Format, Pointer, Proof
from runner.checkpoint.formats.faults import BrokenError

_MODEL = re.compile(r"(?:.*_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:.*_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ZERO_MODEL = re.compile(r"(?:.*_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")


class DeepSpeed(Format):
    """Complete with the model states and, where ZeRO is on, the optimizer states of all ranks."""

    name = "deepspeed"

    def claims(self, entry: Entry) -> bool:
        return any(_is_state(member) for member in entry.sizes if "/" not in member)

    def check(self, entry: Entry) -> Proof:
        if not has_states(entry):
            raise BrokenError("has no DeepSpeed states")
        return check_states(entry)

    def step(self, entry: Entry) -> int | None:
        steps = [entry.contents[member].number("global_steps") for member in entry.sizes if _MODEL.fullmatch(member)]
        return max((step for step in steps if step is not None), default=None)

    def pointer(self, path: Path) -> Pointer:
        return Pointer("latest", path.name)


def has_states(entry: Entry) -> bool:
    """True where DeepSpeed has written states, at the top or below."""
    return any(_is_state(member) for member in entry.sizes)


def _is_state(member: str) -> bool:
    return member.endswith(("_model_states.pt", "_optim_states.pt"))


@dataclass(slots=True)
class _States:
    """The states in one folder. ``models`` are ranks of model parallelism, ``pairs`` (data rank, model rank)."""

    prefix: str
    models: dict[int, str] = field(default_factory=dict)
    optim: set[tuple[int, int]] = field(default_factory=set)
    zero: set[tuple[int, int]] = field(default_factory=set)

    def add(self, name: str) -> None:
        if found := _OPTIM.fullmatch(name):
            self.optim.add((int(found[1]), int(found[2])))
        elif found := _ZERO_MODEL.fullmatch(name):
            self.zero.add((int(found[1]), int(found[2])))
            self.models.setdefault(int(found[2]), name)
        elif found := _MODEL.fullmatch(name):
            self.models[int(found[1])] = name


def _folders(entry: Entry) -> Iterator[_States]:
    folders: dict[str, _States] = {}
    for member in sorted(entry.sizes):
        folder, slash, name = member.rpartition("/")
        if _is_state(name):
            folders.setdefault(folder, _States(folder + slash)).add(name)
    return iter(folders.values())


def ranks_of_states(entry: Entry) -> int:
    """How many data-parallel ranks have written states; 0 where there are none."""
    ranks = [rank + 1 for states in _folders(entry) for rank, _ in states.optim | states.zero]
    return max(ranks, default=0)


def check_states(entry: Entry) -> Proof:
    """Every folder of DeepSpeed states in ``entry``, at its top or below."""
    proofs = [_check_folder(entry, states) for states in _folders(entry)]
    return Proof.NOTHING if Proof.NOTHING in proofs else Proof.WHOLE


def _check_folder(entry: Entry, states: _States) -> Proof:
    if not states.models:
        raise BrokenError(f"{states.prefix}mp_rank_00_model_states.pt is missing")
    first = entry.contents[states.prefix + states.models[min(states.models)]]
    data, model, stage = first.number("dp_world_size"), first.number("mp_world_size"), first.number("stage")
    for rank in range(model or 1):
        if rank not in states.models:
            raise BrokenError(f"{states.prefix}mp_rank_{rank:02d}_model_states.pt is missing")
    ranks = {(d, m) for d in range(data or 1) for m in range(model or 1)}
    if states.zero or stage == 3:
        _require(states.prefix, "model", ranks | states.optim, states.zero)
    if states.optim or (stage or 0) > 0:
        _require(states.prefix, "optim", ranks | states.zero, states.optim)
    # Old torch files tell nothing, not even their own end; and without ZeRO there is nothing after the model states.
    return Proof.WHOLE if data is not None and (states.optim or stage is not None) else Proof.NOTHING


def _require(prefix: str, what: str, ranks: set[tuple[int, int]], there: set[tuple[int, int]]) -> None:
    missing = min(ranks - there, default=None)
    if missing is not None:
        data, model = missing
        raise BrokenError(f"{prefix}zero_pp_rank_{data}_mp_rank_{model:02d}_{what}_states.pt is missing")
