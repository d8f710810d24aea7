"""What earlier supervisors of a run wrote down, here and on other machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runner.checkpoint.layout import LocalLayout, Segment, StoreLayout
from runner.core.record import Line
from runner.errors import ObjectMissing
from runner.storage.api import ObjectStore
from runner.supervisor.journal import read_lines


def local_segments(local: LocalLayout, run: int, kind: str) -> dict[Segment, Path]:
    """The segments of one kind (``journal`` or ``logs``) that lie on this machine."""
    keys = StoreLayout(local.job)
    root = local.run_state(run)
    found = {}
    for path in sorted((root / kind).glob("*/*")):
        segment = keys.parse_segment(keys.run_prefix(run) + path.relative_to(root).as_posix())
        if segment is not None:
            found[segment] = path
    return found


def stored_runs(store: ObjectStore, keys: StoreLayout) -> set[int]:
    """The runs of a job that the store has."""
    found = (keys.run_of(f"{keys.prefix()}{folder}/") for folder in store.folders(keys.prefix()))
    return {run for run in found if run is not None}


def stored_attempts(store: ObjectStore, keys: StoreLayout, run: int) -> Iterator[int]:
    """The attempts of a run that have left something in the store."""
    for kind in ("checkpoints", "journal", "logs"):
        found = map(keys.attempt_in, store.folders(f"{keys.run_prefix(run)}{kind}/"))
        yield from (attempt for attempt in found if attempt is not None)


def stored_segments(store: ObjectStore, keys: StoreLayout, run: int, kind: str) -> dict[Segment, tuple[str, int]]:
    """The segments of one kind in the store, each with its key and size."""
    found = {}
    for info in store.list(f"{keys.run_prefix(run)}{kind}/"):
        segment = keys.parse_segment(info.key)
        if segment is not None:
            found[segment] = info.key, info.size
    return found


def order(segment: Segment) -> tuple[int, str, int]:
    """Attempts are numbered across machines: their order is the order of events, whatever the clocks say."""
    return segment.attempt, segment.attempt_id, segment.number


def journal_lines(store: ObjectStore | None, local: LocalLayout, run: int, *, without: str = "") -> Iterator[Line]:
    """All lines of a run, oldest first, from the disk where they are there and else from the store.

    ``without`` leaves out the session of that id. Raises StoreError when the store cannot be listed.
    """
    here = local_segments(local, run, "journal")
    there = stored_segments(store, StoreLayout(local.job), run, "journal") if store is not None else {}
    records: dict[tuple[int, str], list[Segment]] = {}
    for one in sorted({*here, *there}, key=order):
        if one.attempt_id != without:
            records.setdefault((one.attempt, one.attempt_id), []).append(one)
    sharing = Counter(attempt for attempt, _ in records)

    def lines(record: tuple[int, str]) -> Iterator[Line]:
        return read_lines(segment_bytes(store, here, there, one) for one in records[record])

    def place(record: tuple[int, str]) -> tuple[int, float]:
        # Sessions that began no attempt of their own share a number; among those only time tells the order.
        first = next(lines(record), None) if sharing[record[0]] > 1 else None
        return record[0], float(first["at"]) if first else 0.0

    for record in sorted(records, key=place):
        yield from lines(record)


def segment_bytes(
    store: ObjectStore | None,
    here: dict[Segment, Path],
    there: dict[Segment, tuple[str, int]],
    segment: Segment,
) -> bytes:
    """The content of a segment; empty where it vanished meanwhile."""
    if segment in here:
        with suppress(FileNotFoundError):
            return here[segment].read_bytes()
    if store is not None and segment in there:
        with suppress(ObjectMissing):
            return store.read(there[segment][0])
    return b""
