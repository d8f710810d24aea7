"""What the trainer prints: read always, redacted first, then kept, shown and understood.

One thread drains the pipe. Nothing that happens to a sink may stop it, since a trainer whose output is not read
stops training: a full disk and a blocked terminal lose output, and say so, but never time.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from runner.clock import Clock

READ_BYTES = 1 << 20
LONGEST_LINE = 1 << 16  # longer lines are cut, for scanning only
SHORTEST_SECRET = 4  # hiding shorter values would hide every other number, and nothing that is secret
SHORTEST_SECRET_LINE = 8  # of a secret that has several
MASK = b"***"

_TICK_S = 0.5
_QUIET_S = 0.2  # a pipe that is silent for so long after the trainer's end is drained


def open_pipe() -> tuple[int, int]:
    """A pipe (reading end, writing end), as large as the system allows up to 1 MiB."""
    reading, writing = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, READ_BYTES)
    return reading, writing


# --- redaction ---


class Secrets:
    """Values that must never be seen. Those of several lines are found line by line too, and as JSON spells them."""

    def __init__(self, values: Iterable[str]) -> None:
        needles = {needle for value in values for needle in _spellings(value)}
        # Longest first: of two secrets that begin alike the longer one is hidden whole.
        self.needles = sorted(needles, key=lambda needle: (-len(needle), needle))
        self.pattern = re.compile(b"|".join(map(re.escape, self.needles)) or rb"(?!)")

    def are_in(self, data: bytes) -> bool:
        # Ten searches for plain bytes are many times faster than one for ten alternatives.
        return any(needle in data for needle in self.needles)

    def redact(self, data: bytes) -> bytes:
        return self.pattern.sub(MASK, data) if self.are_in(data) else data

    def redact_text(self, text: str) -> str:
        return self.redact(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def _spellings(value: str) -> Iterable[bytes]:
    lines = value.splitlines()
    for spelling in (value.strip("\r\n"), json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        if len(needle := spelling.encode("utf-8", "surrogateescape")) >= SHORTEST_SECRET:
            yield needle
    for line in lines if len(lines) > 1 else ():
        if len(needle := line.strip().encode("utf-8", "surrogateescape")) >= SHORTEST_SECRET_LINE:
            yield needle


class StreamRedactor:
    """Redacts a stream in pieces, with the same result as redacting the whole."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What is safe to show; an end that may be the beginning of a secret waits for the next piece."""
        data = self._held + data
        cut = min((_beginning_of(needle, data) for needle in self._secrets.needles), default=len(data))
        if cut < len(data):
            cut = self._not_inside_a_match(data, cut)
        self._held = data[cut:]
        return self._secrets.redact(data[:cut])

    def flush(self) -> bytes:
        """The rest, at the end of the stream. What could have become a secret is hidden, unless it is a few letters."""
        held, self._held = self._held, b""
        if self._secrets.are_in(held):
            return self._secrets.redact(held)
        return MASK if len(held) >= SHORTEST_SECRET else held

    def _not_inside_a_match(self, data: bytes, cut: int) -> int:
        for match in self._secrets.pattern.finditer(data) if self._secrets.are_in(data) else ():
            if match.start() < cut < match.end():
                return match.start()
        return cut


def _beginning_of(needle: bytes, data: bytes) -> int:
    """Where, at the end of ``data``, an unfinished ``needle`` begins; the length of ``data`` when none does."""
    at = data.find(needle[:1], max(0, len(data) - len(needle) + 1))
    while at >= 0:
        if needle.startswith(data[at:]):
            return at
        at = data.find(needle[:1], at + 1)
    return len(data)


# --- understanding ---


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the trainer says it is. ``at`` is the clock's time; ``total`` is None when it does not say."""

    step: int
    total: int | None
    at: float


_GAP = rb"['\"]?[ \t]*[:=#]?[ \t]*[\[(]?[ \t]*"
# Possessive: "12.5" must not be read as step 1.
_NUMBER = rb"\d{1,15}+(?:,\d{3})*+(?!\.\d|[\w%])"
_OF_TOTAL = rb"(?:[ \t]*(?:/|of)[ \t]*(?P<total>" + _NUMBER + rb"))?"
_STEP = rb"(?P<step>" + _NUMBER + rb")"
_STEP_OF_TOTAL = rb"(?<![\w.])(?P<step>\d{1,15}+)/(?P<total>\d{1,15}+)"

STEP_PATTERNS = (
    re.compile(rb"(?<!per )(?<![\w-])(?:global[_ -]?)?step" + _GAP + _STEP + _OF_TOTAL, re.IGNORECASE),
    re.compile(rb"(?<![\w-])iter(?:ation)?(?:\(\w+\))?" + _GAP + _STEP + _OF_TOTAL, re.IGNORECASE),
    re.compile(rb"Epoch (?P<epoch>\d{1,9}+)(?:/\d+)?:[ \t]+\d+%\|[^\n]{0,400}?" + _STEP_OF_TOTAL),
    re.compile(_STEP_OF_TOTAL + rb"[ \t]+\[\d+:\d\d"),
)
"""How common trainers print steps, best first: step 120/2000 · iter 120 · Lightning's bar · tqdm's bar."""

_PROGRESS_WINDOW = 1 << 14
_REPORT_EVERY_S = 1.0
_TRUST_S = 60.0


class ProgressFinder:
    """Finds the newest step in the trainer's lines, and reports it once a second at most: the latest wins.

    A pattern of lower rank is heard only when the better ones are silent: the bar of an evaluation is not the step
    of the training beside it.
    """

    def __init__(self, report: Callable[[Progress], None], clock: Clock, pattern: str | None = None) -> None:
        """``pattern`` replaces the default ones: a regex with a group ``step``, perhaps ``total``; else ValueError."""
        self._patterns = (_step_pattern(pattern),) if pattern else STEP_PATTERNS
        self._report = report
        self._clock = clock
        self._rank = len(self._patterns)
        self._heard_at = self._reported_at = float("-inf")
        self._latest: Progress | None = None
        self._waiting = False

    def look(self, lines: bytes) -> None:
        """Look at the end of some whole lines."""
        now = self._clock.now()
        window = lines[-_PROGRESS_WINDOW:]
        for rank, pattern in enumerate(self._patterns):
            if rank > self._rank and now - self._heard_at < _TRUST_S:
                break
            if match := _last_match(pattern, window):
                self._rank, self._heard_at = rank, now
                self._take(match, now)
                break
        self.tick()

    def tick(self, *, at_once: bool = False) -> None:
        """Report what waits, if it is time."""
        now = self._clock.now()
        if self._waiting and self._latest and (at_once or now - self._reported_at >= _REPORT_EVERY_S):
            self._waiting, self._reported_at = False, now
            self._report(self._latest)

    def _take(self, match: re.Match[bytes], now: float) -> None:
        step, total = _step_and_total(match)
        if step is None or (self._latest and (self._latest.step, self._latest.total) == (step, total)):
            return
        self._latest, self._waiting = Progress(step, total, now), True


def _step_pattern(pattern: str) -> re.Pattern[bytes]:
    compiled = _compile(pattern)
    if "step" not in compiled.groupindex:
        raise ValueError(f"the pattern {pattern!r} has no group named step, as in (?P<step>\\d+)")
    return compiled


def _compile(pattern: str) -> re.Pattern[bytes]:
    try:
        return re.compile(pattern.encode(), re.MULTILINE)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _last_match(pattern: re.Pattern[bytes], data: bytes) -> re.Match[bytes] | None:
    found = deque(pattern.finditer(data), maxlen=1)
    return found[0] if found else None


def _step_and_total(match: re.Match[bytes]) -> tuple[int | None, int | None]:
    numbers = {name: _number(value) for name, value in match.groupdict().items()}
    step, total, epoch = numbers["step"], numbers.get("total"), numbers.get("epoch")
    if epoch is not None and step is not None and total is not None:
        return epoch * total + step, None  # the bar counts the batches of one epoch
    return step, total


def _number(text: bytes | None) -> int | None:
    try:
        return int((text or b"").replace(b",", b""))
    except ValueError:
        return None


class Watch:
    """Keeps the first line in which one of some patterns was found."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises ValueError for what is no regular expression."""
        self._patterns = [_compile(pattern) for pattern in patterns]
        self.found: str | None = None

    def look(self, lines: bytes) -> None:
        if self.found is not None:
            return
        # One by one: alternatives in one regex cost the fast search for a literal beginning.
        matches = [match for pattern in self._patterns if (match := pattern.search(lines))]
        if matches:
            self.found = _line_around(lines, min(match.start() for match in matches))


def _line_around(lines: bytes, at: int, most: int = 500) -> str:
    begin = max(lines.rfind(b"\n", 0, at) + 1, at - most // 2)
    end = lines.find(b"\n", at)
    return readable(lines[begin : min(end if end >= 0 else len(lines), begin + most)]).strip()


class LineScanner:
    """Cuts the stream into lines and has them looked at. A carriage return ends a line as well: progress bars."""

    def __init__(self, progress: ProgressFinder, fatal: Sequence[str] = (), retry: Sequence[str] = ()) -> None:
        """Raises ValueError for patterns that are no regular expressions."""
        self._progress = progress
        self._fatal = Watch(fatal)
        self._retry = Watch(retry)
        self._unfinished = b""
        self._skipping = False

    @property
    def fatal(self) -> str | None:
        """The first line that a fatal pattern matched."""
        return self._fatal.found

    @property
    def retry(self) -> str | None:
        """The first line that a retry pattern matched."""
        return self._retry.found

    def feed(self, data: bytes) -> None:
        data = self._skip_rest_of_long_line(data.replace(b"\r", b"\n"))
        data = self._unfinished + data
        cut = data.rfind(b"\n") + 1
        lines, self._unfinished = data[:cut], data[cut:]
        if len(self._unfinished) > LONGEST_LINE:
            lines += self._unfinished[:LONGEST_LINE] + b"\n"
            self._unfinished, self._skipping = b"", True
        self._look(shorten_lines(lines))

    def tick(self) -> None:
        """Report progress that waits, if it is time."""
        self._progress.tick()

    def end(self) -> None:
        """The stream has ended: look at the last line, report the last progress."""
        self._look(self._unfinished)
        self._unfinished = b""
        self._progress.tick(at_once=True)

    def _look(self, lines: bytes) -> None:
        if lines:
            self._fatal.look(lines)
            self._retry.look(lines)
            self._progress.look(lines)

    def _skip_rest_of_long_line(self, data: bytes) -> bytes:
        if not self._skipping:
            return data
        at = data.find(b"\n")
        self._skipping = at < 0
        return data[at + 1 :] if at >= 0 else b""


def shorten_lines(lines: bytes, longest: int = LONGEST_LINE) -> bytes:
    """The same lines, none longer than ``longest``. The usual case, none is, costs a look at each ``longest`` bytes."""
    kept: list[bytes] = []
    begin = at = 0
    while at + longest < len(lines):
        newline = lines.rfind(b"\n", at, at + longest + 1)
        if newline >= 0:
            at = newline + 1
            continue
        kept.append(lines[begin : at + longest])
        rest = lines.find(b"\n", at + longest)
        begin = at = rest if rest >= 0 else len(lines)
    return b"".join([*kept, lines[begin:]]) if kept else lines


# --- the last lines ---

_TAIL_BYTES = 1 << 17
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -~]?")


def readable(data: bytes) -> str:
    """Text for a person: colours, control characters and broken UTF-8 taken out."""
    text = _ESCAPES.sub(b"", data).decode("utf-8", "replace")
    return "".join(letter for letter in text if letter.isprintable() or letter == "\t")


class Tail:
    """The last lines as a terminal would show them. Any thread may ask."""

    def __init__(self, lines: int = 40, longest: int = 1000) -> None:
        self._count = lines
        self._longest = longest
        self._recent = bytearray()
        self._lock = threading.Lock()

    def feed(self, data: bytes) -> None:
        with self._lock:
            self._recent += data[-_TAIL_BYTES:]
            if len(self._recent) > 2 * _TAIL_BYTES:
                del self._recent[:-_TAIL_BYTES]

    def lines(self) -> tuple[str, ...]:
        with self._lock:
            recent = bytes(self._recent)
        # What a carriage return overwrote is not shown: an error must not drown in a progress bar.
        last = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in recent.split(b"\n"))
        shown = (readable(line)[: self._longest].rstrip() for line in last)
        return tuple([line for line in shown if line][-self._count :])


# --- keeping and showing ---


class Appendable(Protocol):
    """Where the log is kept. ``append`` may raise OSError; then the bytes count as lost."""

    def append(self, data: bytes) -> None: ...


class DiskLog:
    """Appends to the log. While that fails (a full disk) output is dropped and counted; later a line says how much."""

    def __init__(self, log: Appendable) -> None:
        self._log = log
        self._why = ""
        self.lost = 0
        """Bytes lost and not yet told of in the log."""

    def feed(self, data: bytes) -> None:
        try:
            self._log.append(self._note() + data)
            self.lost = 0
        except OSError as error:
            self.lost += len(data)
            self._why = error.strerror or str(error)

    def end(self) -> None:
        if self.lost:
            self.feed(b"")

    def _note(self) -> bytes:
        return _note(f"{self.lost} bytes of output are missing here: {self._why}") if self.lost else b""


def _note(text: str) -> bytes:
    return f"\n[cloudrun] {text}\n".encode()


class Console:
    """Shows output on a terminal, or what else ``fd`` is, from a thread of its own. Several threads may feed it.

    A terminal that is too slow, or blocked, misses some, and is told how much.
    """

    def __init__(self, fd: int, limit: int = 4 << 20) -> None:
        self._fd = fd
        self._limit = limit
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._missed = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        with self._changed:
            if self._size + len(data) > self._limit:
                self._missed += len(data)
                return
            self._own_up()
            self._queue.append(data)
            self._size += len(data)
            self._changed.notify()

    def close(self, within: float = 2.0) -> None:
        """Show what waits, for ``within`` seconds at most."""
        with self._changed:
            self._own_up()
            self._closing = True
            self._changed.notify()
        self._thread.join(within)

    def _own_up(self) -> None:
        if self._missed:
            self._queue.append(_note(f"{self._missed} bytes are not shown: the terminal is too slow. The log has them"))
            self._missed = 0

    def _run(self) -> None:
        while data := self._next():
            try:
                _write_all(self._fd, data)
            except OSError:
                return  # the terminal has gone; feed() fills the queue once and then counts only

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return b""
            data = b"".join(self._queue)
            self._queue.clear()
            self._size = 0
            return data


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # somebody made the terminal non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll(1000)


# --- reading ---


class OutputReader:
    """Drains the trainer's pipe in a thread, and hands what it read, redacted, to everything that wants it."""

    def __init__(
        self, fd: int, *, secrets: Secrets, disk: DiskLog, scanner: LineScanner, tail: Tail, console: Console | None
    ) -> None:
        """``fd`` is the reading end; the thread closes it. The caller closes its own copy of the writing end."""
        self._fd = fd
        self._redactor = StreamRedactor(secrets)
        self._disk = disk
        self._scanner = scanner
        self._tail = tail
        self._console = console
        self._drain_until: float | None = None
        self.error: Exception | None = None
        """The fault that stopped the log; the pipe is drained all the same."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, within: float = 5.0) -> bool:
        """The trainer has ended: read what is left, for ``within`` seconds at most, even if the pipe stays open.

        False when the thread does not end (a disk that hangs).
        """
        self._drain_until = time.monotonic() + within
        self._thread.join(within + 2 * _TICK_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001  # a thread's edge: whatever fails, the trainer must not block
            self.error = error
            while self._read(_nothing):
                pass
        finally:
            os.close(self._fd)

    def _listen(self) -> None:
        while data := self._read(self._scanner.tick):
            self._pass_on(self._redactor.feed(data))
        self._pass_on(self._redactor.flush())
        self._scanner.end()
        self._disk.end()

    def _read(self, when_idle: Callable[[], None]) -> bytes:
        """The next piece; empty at the end."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while True:
            until = self._drain_until
            if until is not None and time.monotonic() >= until:
                return b""
            if poll.poll(1000 * (_TICK_S if until is None else _QUIET_S)):
                return os.read(self._fd, READ_BYTES)
            if until is not None:
                return b""
            when_idle()

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        self._disk.feed(data)
        if self._console:
            self._console.feed(data)
        self._tail.feed(data)
        self._scanner.feed(data)


def _nothing() -> None:
    pass
