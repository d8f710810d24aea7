"""What belongs to no trainer that we know: single files, and folders of them."""

from __future__ import annotations

from runner.checkpoint.formats.dcp import check_shards
from runner.checkpoint.formats.entry import Entry, Format, Proof
from runner.checkpoint.formats.ranks import check_index

# The names under which scripts keep their step, the surest first.
_STEP_KEYS = ("global_step", "iter_num", "iteration", "global_steps", "step")


class Torch(Format):
    """A file of ``torch.save``: its directory comes last, and every part must be where that says."""

    name = "torch"

    def claims(self, entry: Entry) -> bool:
        return not entry.is_dir and entry.content.kind == "torch"

    def check(self, entry: Entry) -> Proof:  # noqa: ARG002 - its content is known to be whole
        return Proof.WHOLE

    def step(self, entry: Entry) -> int | None:
        return entry.content.number(*_STEP_KEYS)


class OldTorch(Format):
    """What torch wrote before it wrote zips, and plain pickles: they tell nothing of their end."""

    name = "pickle"

    def claims(self, entry: Entry) -> bool:
        return not entry.is_dir and entry.content.kind == "pickle"

    def check(self, entry: Entry) -> Proof:  # noqa: ARG002 - its end has been looked at
        return Proof.NOTHING


class Safetensors(Format):
    """A file whose header says how long it is."""

    name = "safetensors"

    def claims(self, entry: Entry) -> bool:
        return not entry.is_dir and entry.content.kind == "safetensors"

    def check(self, entry: Entry) -> Proof:  # noqa: ARG002 - its content is known to be whole
        return Proof.WHOLE


class Any(Format):
    """Whatever else, for who asked for it: it must be quiet."""

    name = "any"

    def claims(self, entry: Entry) -> bool:
        return not entry.is_dir

    def check(self, entry: Entry) -> Proof:  # noqa: ARG002 - nothing is known of it
        return Proof.NOTHING


class Folder(Format):
    """A folder of files that are whole one by one: more may come."""

    name = "folder"

    def claims(self, entry: Entry) -> bool:
        return entry.is_dir

    def check(self, entry: Entry) -> Proof:
        check_index(entry)
        return min(check_shards(entry), Proof.NOTHING)
