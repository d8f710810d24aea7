"""Lightning: ``.ckpt`` files; with FSDP, ModelParallel or DeepSpeed, folders of that name."""

from __future__ import annotations

from runner.checkpoint.formats.dcp import check_shards, ranks_of_shards
from runner.checkpoint.formats.deepspeed import check_states, has_states
from runner.checkpoint.formats.entry import Entry, Format, Proof
from runner.checkpoint.formats.faults import BrokenError

_OWN_KEY = b"pytorch-lightning_version"
_META = "meta.pt"


class Lightning(Format):
    """A whole torch file that Lightning has signed; a folder of shards in which it has written ``meta.pt`` last."""

    name = "lightning"

    def claims(self, entry: Entry) -> bool:
        if entry.is_dir:
            return _META in entry.sizes or (entry.name.endswith(".ckpt") and _is_sharded(entry))
        return entry.content.kind == "torch" and _OWN_KEY in entry.content.pickle

    def check(self, entry: Entry) -> Proof:
        if not entry.is_dir:
            return Proof.WHOLE
        if not _is_sharded(entry):
            raise BrokenError("has no .metadata")
        proof = min(check_shards(entry), check_states(entry))
        if ranks_of_shards(entry) and _META not in entry.sizes:
            raise BrokenError(f"has no {_META}, which Lightning writes last")
        return proof

    def step(self, entry: Entry) -> int | None:
        content = entry.contents.get(_META) if entry.is_dir else entry.content
        return content.number("global_step") if content is not None else None


def _is_sharded(entry: Entry) -> bool:
    return ".metadata" in entry.sizes or bool(ranks_of_shards(entry) or has_states(entry))
