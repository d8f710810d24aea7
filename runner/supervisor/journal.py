"""The journal: one JSON line per turn of the loop, durable before its actions are performed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runner.core.record import Line
from runner.supervisor.segments import SegmentWriter

# When the disk is full, this many lines wait in memory for room.
LINES_HELD = 10_000


class Journal:
    """Writes the lines of one supervisor session, into one record per attempt.

    What happens before the run and the attempt are known is held back and opens the first record; a session that never
    gets that far leaves none. A full disk never stops the loop: lines wait in memory until there is room again.
    """

    def __init__(self, path_of: Callable[[int, int, int], Path]) -> None:
        """``path_of(run, attempt, n)`` names segment n of an attempt's record."""
        self._path_of = path_of
        self._writer: SegmentWriter | None = None
        self._place = (0, 0)
        self._held: list[tuple[bytes, bool]] = []

    def write(self, line: Line, run: int, attempt: int, *, durable: bool) -> None:
        """Add a line to the record of an attempt; ``run`` is 0 while it is not known. Never raises OSError."""
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        # A file name that is no text has lone surrogates: they become the escapes that JSON has for them.
        self._held.append((text.encode("utf-8", "backslashreplace") + b"\n", durable))
        del self._held[:-LINES_HELD]
        if run:
            self._pour(self._writer_of(run, attempt))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _writer_of(self, run: int, attempt: int) -> SegmentWriter:
        if self._writer is None or self._place != (run, attempt):
            self.close()
            self._place = (run, attempt)
            # A run that was marked as done by hand may have no attempt: its record is kept as the first one's.
            self._writer = SegmentWriter(lambda n: self._path_of(run, max(attempt, 1), n))
        return self._writer

    def _pour(self, writer: SegmentWriter) -> None:
        try:
            while self._held:
                data, durable = self._held[0]
                writer.append(data, durable=durable)
                del self._held[0]
        except OSError:
            # No room now. A torn line is skipped by readers; this one is written again, whole, on a line of its own.
            data, durable = self._held[0]
            self._held[0] = (b"\n" + data.lstrip(b"\n"), durable)


def read_lines(segments: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a record, from its segments in order. Torn and foreign lines are skipped."""
    rest = b""
    for segment in segments:
        *whole, rest = (rest + segment).split(b"\n")
        yield from (line for raw in whole if (line := parse_line(raw)) is not None)
    if (line := parse_line(rest)) is not None:
        yield line


def parse_line(raw: bytes) -> Line | None:
    """One journal line, or None where it is not one."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    whole = isinstance(line, dict) and isinstance(line.get("event"), dict) and isinstance(line.get("at"), int | float)
    return line if whole and isinstance(line["event"].get("type"), str) else None
