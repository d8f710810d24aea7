"""Files that come in numbers: one for every rank, or as an index says."""

from __future__ import annotations

import re

from runner.checkpoint.formats.entry import Entry, read_json
from runner.checkpoint.formats.faults import BrokenError


def check_ranks(entry: Entry, pattern: str, name: str, least: int) -> None:
    """Raise BrokenError unless the files that match are numbered 0, 1, 2... without a gap, and at least so many."""
    ranks = {int(found[1]) for member in entry.sizes if (found := re.fullmatch(pattern, member))}
    count = max(least, max(ranks, default=-1) + 1)
    missing = next((rank for rank in range(count) if rank not in ranks), None)
    if missing is not None:
        raise BrokenError(f"{name.format(missing)} is missing")


def check_index(entry: Entry) -> None:
    """Raise BrokenError unless every shard that an ``*.index.json`` names is there."""
    for index in (member for member in entry.sizes if member.endswith(".index.json")):
        weights = read_json(entry.path / index).get("weight_map")
        shards = set(weights.values()) if isinstance(weights, dict) else set()
        folder = index.rpartition("/")[0]
        needed = sorted(f"{folder}/{shard}" if folder else str(shard) for shard in shards)
        missing = [shard for shard in needed if shard not in entry.sizes]
        if missing:
            raise BrokenError(f"{missing[0]} is missing, which {index} names")
