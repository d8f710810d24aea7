"""accelerate's ``save_state``: models and optimizers first, then every rank's ``random_states_<rank>.pkl``."""

from __future__ import annotations

import re

from runner.checkpoint.formats.dcp import check_shards, ranks_of_shards
from runner.checkpoint.formats.deepspeed import check_states, ranks_of_states
from runner.checkpoint.formats.entry import Entry, Format, Proof
from runner.checkpoint.formats.faults import BrokenError
from runner.checkpoint.formats.ranks import check_index, check_ranks

_LAST = re.compile(r"(?:random_states|custom_checkpoint)_\d+\.pkl")
_NAME = re.compile(r"checkpoint_\d+")


class Accelerate(Format):
    """Objects that the script has registered are written after the random states, so those do not prove the end."""

    name = "accelerate"

    def claims(self, entry: Entry) -> bool:
        named = _NAME.fullmatch(entry.name) is not None and "optimizer.bin" in entry.sizes
        return named or any(_LAST.fullmatch(member) for member in entry.sizes)

    def check(self, entry: Entry) -> Proof:
        check_index(entry)
        proofs = check_shards(entry), check_states(entry)
        if not any(member.startswith("random_states_") for member in entry.sizes):
            raise BrokenError("has no random_states_0.pkl, which accelerate writes last")
        least = max(ranks_of_shards(entry), ranks_of_states(entry), 1)
        check_ranks(entry, r"random_states_(\d+)\.pkl", "random_states_{}.pkl", least)
        check_ranks(entry, r"custom_checkpoint_(\d+)\.pkl", "custom_checkpoint_{}.pkl", 0)
        return min(*proofs, Proof.LAST)
