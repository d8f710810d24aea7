"""The trainer's output: read always, redacted before all else, kept, shown and understood."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.supervisor.output import (
    LONGEST_LINE,
    Console,
    DiskLog,
    LineScanner,
    OutputReader,
    Progress,
    ProgressFinder,
    Secrets,
    StreamRedactor,
    Tail,
    open_pipe,
    shorten_lines,
)


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Log:
    """Keeps the log in memory; refuses while ``why`` is set."""

    def __init__(self) -> None:
        self.data = b""
        self.why: OSError | None = None

    def append(self, data: bytes) -> None:
        if self.why:
            raise self.why
        self.data += data


class Desk:
    """A reader with everything connected, and the end of the pipe that a trainer would have."""

    def __init__(self, secrets: tuple[str, ...] = (), console: Console | None = None, **patterns: list[str]) -> None:
        self.clock = HandClock()
        self.progress: list[Progress] = []
        self.log = Log()
        self.disk = DiskLog(self.log)
        self.tail = Tail()
        self.scanner = LineScanner(ProgressFinder(self.progress.append, self.clock), **patterns)
        reading, self.pipe = open_pipe()
        self.reader = OutputReader(
            reading, secrets=Secrets(secrets), disk=self.disk, scanner=self.scanner, tail=self.tail, console=console
        )
        self.reader.start()

    def prints(self, *pieces: bytes) -> None:
        for piece in pieces:
            os.write(self.pipe, piece)

    def ends(self) -> None:
        os.close(self.pipe)
        assert self.reader.finish(within=5)
        assert self.reader.error is None


def eventually(condition: object, within: float = 5.0) -> None:
    assert callable(condition)
    give_up = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


# --- the whole way ---


def test_binary_junk_is_kept_byte_for_byte() -> None:
    desk = Desk()
    junk = bytes(range(256)) * 500
    desk.prints(junk)
    desk.ends()
    assert desk.log.data == junk


def test_secret_is_hidden_before_anything_sees_it(tmp_path: Path) -> None:
    screen = tmp_path / "screen"
    fd = os.open(screen, os.O_WRONLY | os.O_CREAT)
    console = Console(fd)
    desk = Desk(secrets=("hunter2hunter2",), console=console, fatal=["token .*"])
    desk.prints(b"token hunter2")
    time.sleep(0.05)
    desk.prints(b"hunter2\nstep 3\n")
    desk.ends()
    console.close()
    os.close(fd)
    assert desk.log.data == screen.read_bytes() == b"token ***\nstep 3\n"
    assert desk.tail.lines() == ("token ***", "step 3")
    assert desk.scanner.fatal == "token ***"


def test_reader_ends_although_somebody_holds_the_pipe() -> None:
    desk = Desk()
    desk.prints(b"last words\n")
    begin = time.monotonic()
    assert desk.reader.finish(within=5)
    assert time.monotonic() - begin < 2
    assert desk.log.data == b"last words\n"
    os.close(desk.pipe)


def test_reader_ends_although_somebody_goes_on_writing() -> None:
    desk = Desk()
    with subprocess.Popen(["yes"], stdout=desk.pipe, stderr=subprocess.DEVNULL) as noisy:
        begin = time.monotonic()
        assert desk.reader.finish(within=0.5)
        assert time.monotonic() - begin < 3
        noisy.kill()
    os.close(desk.pipe)


def test_fault_in_a_sink_does_not_block_the_trainer() -> None:
    desk = Desk()
    desk.log.why = RuntimeError("a fault of ours")  # type: ignore[assignment]  # what append never promises to raise
    for _ in range(8):
        desk.prints(b"x" * (1 << 20))
    os.close(desk.pipe)
    assert desk.reader.finish(within=5)
    assert isinstance(desk.reader.error, RuntimeError)


def test_a_flood_passes_quickly_in_little_memory() -> None:
    script = (
        "import os, resource, subprocess, time\n"
        "from runner.clock import SystemClock\n"
        "from runner.supervisor.output import *\n"
        "class Log:\n"
        "    size = 0\n"
        "    def append(self, data): self.size += len(data)\n"
        "reading, writing = open_pipe()\n"
        "log = Log()\n"
        "scanner = LineScanner(ProgressFinder(print, SystemClock()), ['CUDA out of memory'], ['NCCL error'])\n"
        "reader = OutputReader(reading, secrets=Secrets(['correct horse']), disk=DiskLog(log), scanner=scanner,\n"
        "    tail=Tail(), console=Console(os.open(os.devnull, os.O_WRONLY)))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "begin = time.monotonic()\n"
        "flood = subprocess.Popen('yes some words 0.123 | head -c 200000000', shell=True, stdout=writing)\n"
        "os.close(writing)\n"
        "reader.start()\n"
        "flood.wait()\n"
        "assert reader.finish(30) and reader.error is None and log.size == 200_000_000, log.size\n"
        "print(time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    seconds, kilobytes = map(float, done.stdout.split())
    assert seconds < 20
    assert kilobytes < 40_000


# --- redaction ---

LETTERS = st.text(alphabet="ab\n", max_size=12)


@given(secrets=st.lists(LETTERS, max_size=4), pieces=st.lists(LETTERS, max_size=8))
def test_redaction_in_pieces_is_redaction_of_the_whole(secrets: list[str], pieces: list[str]) -> None:
    known = Secrets(secrets)
    stream = StreamRedactor(known)
    pieces = [*pieces, "."]  # no secret can be unfinished at the end
    shown = b"".join(stream.feed(piece.encode()) for piece in pieces) + stream.flush()
    assert shown == known.redact("".join(pieces).encode())
    assert not known.are_in(shown)


def test_only_what_may_become_a_secret_is_held_back() -> None:
    stream = StreamRedactor(Secrets(["secret-word"]))
    assert stream.feed(b"a se") == b"a "
    assert stream.feed(b"cond. secret-wor") == b"second. "
    assert stream.feed(b"d!") == b"***!"


def test_longer_secret_that_begins_with_a_shorter_one() -> None:
    stream = StreamRedactor(Secrets(["abcd", "abcdefgh"]))
    assert stream.feed(b"abcd") == b""
    assert stream.feed(b"efgh abcd.") == b"*** ***."


def test_secret_cut_off_by_the_end_is_hidden_too() -> None:
    stream = StreamRedactor(Secrets(["secret-word"]))
    assert stream.feed(b"secret-wor") + stream.flush() == b"***"
    assert stream.feed(b"was it") + stream.flush() == b"was it"


def test_secret_of_several_lines() -> None:
    key = "-----BEGIN KEY-----\nMIIBVgIBADANBg\nkqhkiG9w0BAQ==\n"
    secrets = Secrets([key])
    assert secrets.redact(key.encode()) == b"***\n"
    assert secrets.redact(b"| kqhkiG9w0BAQ==\r\n") == b"| ***\r\n"
    assert secrets.redact_text(f'{{"key": {key!r}}}').count("MIIB") == 0


def test_values_too_short_to_be_secret_hide_nothing() -> None:
    assert Secrets(["", "1", "abc"]).redact(b"step 1 abc") == b"step 1 abc"


def test_secret_as_json_spells_it() -> None:
    assert Secrets(['pass"word\\ü']).redact_text(r'{"a": "pass\"word\\\u00fc"}') == '{"a": "***"}'


# --- the log on the disk ---


def test_full_disk_loses_output_and_says_so(tmp_path: Path) -> None:
    desk = Desk()
    full = DiskLog(FullDevice())
    full.feed(b"lost\n")
    assert full.lost == 5
    desk.prints(b"before\n")
    eventually(lambda: desk.log.data)
    desk.log.why = OSError(28, "No space left on device")
    desk.prints(b"x" * 1000)
    eventually(lambda: desk.disk.lost)
    desk.log.why = None
    desk.prints(b"after\n")
    desk.ends()
    assert desk.log.data == (
        b"before\n\n[cloudrun] 1000 bytes of output are missing here: No space left on device\nafter\n"
    )
    assert desk.disk.lost == 0


class FullDevice:
    """A disk that is really full."""

    def append(self, data: bytes) -> None:
        fd = os.open("/dev/full", os.O_WRONLY)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)


# --- the console ---


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads, as a blocked terminal: (reading end, writing end)."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def read_until_silent(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data, silent = b"", 0
    while silent < 20:
        try:
            data, silent = data + os.read(fd, 1 << 20), 0
        except BlockingIOError:
            silent += 1
            time.sleep(0.01)
    return data


def test_blocked_terminal_blocks_nobody_and_is_told_what_it_missed(terminal: tuple[int, int]) -> None:
    reading, writing = terminal
    console = Console(writing, limit=200_000)
    begin = time.monotonic()
    for _ in range(100):
        console.feed(b"x" * 100_000)
    assert time.monotonic() - begin < 1
    console.close(within=0.1)
    shown = read_until_silent(reading)
    assert b"bytes are not shown: the terminal is too slow" in shown
    assert shown.count(b"x") < 1_000_000


def test_terminal_that_has_gone_is_no_error(terminal: tuple[int, int]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    console = Console(writing)
    console.feed(b"hello")
    console.close()
    os.close(writing)


def test_non_blocking_terminal_gets_everything(terminal: tuple[int, int]) -> None:
    reading, writing = terminal
    os.set_blocking(writing, False)
    console = Console(writing)
    console.feed(b"x" * 500_000)
    assert len(read_until_silent(reading)) == 500_000
    console.close()


# --- progress ---


def steps_in(*pieces: bytes, pattern: str | None = None) -> list[tuple[int, int | None]]:
    """What is reported when each piece comes ten seconds after the one before."""
    clock, seen = HandClock(), list[Progress]()
    scanner = LineScanner(ProgressFinder(seen.append, clock, pattern))
    for piece in pieces:
        scanner.feed(piece)
        clock.time += 10
    scanner.end()
    return [(progress.step, progress.total) for progress in seen]


@pytest.mark.parametrize(
    ("line", "step", "total"),
    [
        ("step 120/2000 loss 0.31 accuracy 0.94", 120, 2000),
        ("step: 120", 120, None),
        ("step=120, loss=0.3", 120, None),
        ("Step [120/2000], Loss: 0.3", 120, 2000),
        ("[step 120] loss 0.3", 120, None),
        ("Step 120 of 2000", 120, 2000),
        ("step 1,200/20,000", 1200, 20000),
        ("{'loss': 0.3, 'global_step': 120}", 120, None),
        ('{"step": 120, "loss": 0.3}', 120, None),
        ("trainer/global_step: 120", 120, None),
        ("INFO [Step #120]", 120, None),
        (" 6%|6    | 120/2000 [00:10<02:40, 11.71it/s]", 120, 2000),
        ("Epoch 3:  12%| 12/100 [00:01<00:10, 8.1it/s, v_num=3]", 312, None),
        ("Epoch 3/9:  12%|███▏   | 12/100 [00:01<00:10, 8.1it/s]", 312, None),
        ("iter 120: loss 2.3, time 12.1ms", 120, None),
        ("Iter(train) [ 50/160000]  lr: 1e-2", 50, 160000),
        (" iteration      120/  500000 | consumed samples: 12", 120, 500000),
    ],
)
def test_step_of_common_trainers(line: str, step: int, total: int | None) -> None:
    assert steps_in(line.encode() + b"\n") == [(step, total)]


@pytest.mark.parametrize(
    "line",
    [
        "step time: 0.35 s",
        "step 0.35s",
        "time per step: 12 ms",
        "step 12ms",
        "steps_per_epoch=500",
        "max_steps: 2000",
        "warmup_step=500",
        "footstep 12",
        "2024/12/31 12:00:00 [INFO] ready",
        "downloading: 12.5M/100M [00:01<00:10]",
        "Epoch 3 done",
        "step none",
        "step 12345678901234567890",
    ],
)
def test_what_is_no_step(line: str) -> None:
    assert steps_in(line.encode() + b"\n") == []


def test_bar_of_an_evaluation_is_not_the_step_while_the_training_speaks() -> None:
    bar = b"\r 50%|##  | 5/10 [00:01<00:01, 1.0it/s]\r"
    assert steps_in(b"step 100\n", bar, b"step 120\n", bar) == [(100, None), (120, None)]


def test_bar_counts_when_nothing_else_has_been_said_for_long() -> None:
    clock, seen = HandClock(), list[Progress]()
    finder = ProgressFinder(seen.append, clock)
    finder.look(b"Step 1: load the data\n")
    clock.time += 120
    finder.look(b" 6%|6    | 120/2000 [00:10<02:40, 11.71it/s]\n")
    assert [progress.step for progress in seen] == [1, 120]


def test_pattern_of_the_spec_replaces_the_default_ones() -> None:
    pattern = r"^done (?P<step>\d+) of (?P<total>\d+)$"
    assert steps_in(b"step 7\n", b"done 3 of 9\nmore\n", pattern=pattern) == [(3, 9)]


@pytest.mark.parametrize("pattern", ["step (", r"step (\d+)"])
def test_pattern_that_is_none_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="the pattern"):
        ProgressFinder(print, HandClock(), pattern)


def test_progress_once_a_second_and_the_latest_wins() -> None:
    clock, seen = HandClock(), list[Progress]()
    scanner = LineScanner(ProgressFinder(seen.append, clock))
    for step in range(1, 31):
        scanner.feed(b"step %d\n" % step)
        clock.time += 0.1
    assert [progress.step for progress in seen] == [1, 11, 21]
    scanner.tick()
    assert [progress.step for progress in seen] == [1, 11, 21, 30]
    assert seen[-1].at == pytest.approx(1002.9)


def test_the_same_step_again_is_no_progress() -> None:
    assert steps_in(b"step 5\n", b"step 5\n", b"step 6\n") == [(5, None), (6, None)]


def test_last_step_is_reported_at_the_end_at_once() -> None:
    desk = Desk()
    desk.prints(b"step 1\n")
    eventually(lambda: desk.progress)
    desk.prints(b"step 2\nstep 3")
    desk.ends()
    assert [progress.step for progress in desk.progress] == [1, 3]


def test_waiting_progress_is_reported_though_the_trainer_says_no_more() -> None:
    desk = Desk()
    desk.prints(b"step 1\n")
    eventually(lambda: desk.progress)
    desk.prints(b"step 2\n")
    time.sleep(0.05)
    desk.clock.time += 1.5
    eventually(lambda: len(desk.progress) == 2)
    desk.ends()


# --- patterns in lines ---


def scanned(*pieces: bytes, fatal: tuple[str, ...] = (), retry: tuple[str, ...] = ()) -> LineScanner:
    scanner = LineScanner(ProgressFinder(lambda _: None, HandClock()), fatal, retry)
    for piece in pieces:
        scanner.feed(piece)
    scanner.end()
    return scanner


def test_first_line_that_matches_is_kept() -> None:
    scanner = scanned(
        b"fine\nRuntimeError: CUDA out of mem",
        b"ory. Tried to allocate\nNCCL error\nCUDA out of memory again\n",
        fatal=("AssertionError", "CUDA out of memory"),
        retry=("^NCCL",),
    )
    assert scanner.fatal == "RuntimeError: CUDA out of memory. Tried to allocate"
    assert scanner.retry == "NCCL error"


def test_inline_flags_groups_and_back_references_mean_what_they_say() -> None:
    scanner = scanned(b"all Well well\n", fatal=(r"(x)\1", r"(?i)(well) \1"))
    assert scanner.fatal == "all Well well"


def test_kept_line_is_short_and_clean() -> None:
    scanner = scanned(b"a" * 5000 + b"\x1b[31mboom\x1b[0m\x07" + b"b" * 5000 + b"\n", fatal=("boom",))
    assert scanner.fatal is not None
    assert "boom" in scanner.fatal
    assert len(scanner.fatal) <= 500
    assert scanner.fatal.isprintable()


def test_carriage_returns_end_lines() -> None:
    assert scanned(b"\r10%\r20% error\r30%", fatal=("^20% error$",)).fatal == "20% error"


def test_line_without_end_costs_little() -> None:
    begin = time.monotonic()
    scanner = scanned(*[b"x" * 10_000] * 5000, b"\nboom\n", fatal=("boom",))
    assert scanner.fatal == "boom"
    assert time.monotonic() - begin < 5


@given(lines=st.lists(st.integers(0, 40), max_size=30), longest=st.integers(1, 15), ended=st.booleans())
def test_shortened_lines(lines: list[int], longest: int, ended: bool) -> None:
    text = b"\n".join(b"x" * length for length in lines) + b"\n" * ended
    assert shorten_lines(text, longest) == b"\n".join(line[:longest] for line in text.split(b"\n"))


def test_what_stands_beyond_64_kib_of_a_line_is_not_scanned() -> None:
    assert scanned(b"x" * LONGEST_LINE + b"boom\nfine\n", fatal=("boom",)).fatal is None
    assert scanned(b"x" * LONGEST_LINE, b"boom", b"boom\nfine\n", fatal=("boom",)).fatal is None


# --- the last lines ---


def tail_of(*pieces: bytes) -> tuple[str, ...]:
    tail = Tail()
    for piece in pieces:
        tail.feed(piece)
    return tail.lines()


def test_tail_is_the_last_forty_lines() -> None:
    assert tail_of(b"".join(b"line %d\n" % n for n in range(100)), b"the end") == (
        *(f"line {n}" for n in range(61, 100)),
        "the end",
    )


def test_tail_is_text_for_a_person() -> None:
    assert tail_of(b"\x1b[1;31merror:\x1b[0m \xff\x00bad\tvalue \xe2\x9c\x93\r\n\n") == ("error: �bad\tvalue ✓",)
    assert tail_of(b"\x1b]0;title\x07text\x1b[2K\n") == ("text",)


def test_progress_bars_do_not_push_errors_out() -> None:
    bar = b"".join(b"\r%3d%%|####" % n for n in range(101))
    assert tail_of(b"error: this\n", bar * 10, b"\nlast\n") == ("error: this", "100%|####", "last")


def test_tail_keeps_little_of_a_flood() -> None:
    tail = Tail()
    for _ in range(200):
        tail.feed(b"word " * 20_000 + b"\n")
    assert len(tail.lines()[-1]) <= 1000
    assert len(tail._recent) <= 300_000


def test_tail_may_be_asked_while_it_is_fed() -> None:
    tail = Tail()

    def feed() -> None:
        for _ in range(200):
            tail.feed(b"line\n" * 1000)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while feeder.is_alive():
        assert set(tail.lines()) <= {"line"}
    feeder.join()
