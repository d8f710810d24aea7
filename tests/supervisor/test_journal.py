"""The journal: whole lines, in order, whatever the disk does."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.core.record import Line
from runner.supervisor.journal import Journal, read_lines
from runner.supervisor.segments import SEGMENT_BYTES, SegmentWriter


def line(number: int, text: str = "") -> Line:
    return {"at": float(number), "event": {"type": "Noticed", "text": text}}


def journal(root: Path) -> Journal:
    return Journal(lambda run, attempt, n: root / f"{run}-{attempt}" / f"{n:06d}")


def lines_of(record: Path) -> list[Line]:
    return list(read_lines(path.read_bytes() for path in sorted(record.iterdir())))


@contextmanager
def files_limited_to(count: int) -> Iterator[None]:
    """The system writes a part, and then says no, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_came_before_the_run_was_known_opens_its_first_record(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.write(line(1), 0, 0, durable=True)
    assert not list(tmp_path.iterdir())
    written.write(line(2), 1, 1, durable=True)
    written.write(line(3), 1, 2, durable=True)
    written.close()
    assert lines_of(tmp_path / "1-1") == [line(1), line(2)]
    assert lines_of(tmp_path / "1-2") == [line(3)]


def test_lines_wait_while_there_is_no_room_and_are_written_later(tmp_path: Path) -> None:
    written = journal(tmp_path / "disk")
    (tmp_path / "disk").write_text("no folder, for now")
    for number in range(3):
        written.write(line(number), 1, 1, durable=True)
    (tmp_path / "disk").unlink()
    written.write(line(3), 1, 1, durable=True)
    assert lines_of(tmp_path / "disk/1-1") == [line(number) for number in range(4)]


def test_a_line_that_was_torn_by_a_full_disk_is_written_again_whole(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.write(line(0), 1, 1, durable=True)
    size = (tmp_path / "1-1/000001").stat().st_size
    with files_limited_to(size + 10):
        written.write(line(1), 1, 1, durable=True)
        written.write(line(2), 1, 1, durable=True)
    assert (tmp_path / "1-1/000001").stat().st_size == size + 10, "a part of the line is there"
    written.write(line(3), 1, 1, durable=True)
    assert lines_of(tmp_path / "1-1") == [line(number) for number in range(4)]


def test_text_that_is_no_text_is_written_too(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.write(line(1, "caf\udce9"), 1, 1, durable=True)
    assert lines_of(tmp_path / "1-1") == [line(1, "caf\udce9")]


def test_a_run_that_never_had_an_attempt_has_a_record(tmp_path: Path) -> None:
    journal(tmp_path).write(line(1), 1, 0, durable=True)
    assert lines_of(tmp_path / "1-1") == [line(1)]


@pytest.mark.parametrize(
    "foreign", [b'{"at": 1', b"[]", b"7", b'{"at": "x", "event": {"type": "Woke"}}', b'{"at": 1, "event": {}}', b"\xff"]
)
def test_readers_skip_what_is_no_line(foreign: bytes) -> None:
    good = b'{"at": 1, "event": {"type": "Woke"}}'
    assert len(list(read_lines([good + b"\n" + foreign + b"\n", good]))) == 2


def test_a_line_may_cross_segments() -> None:
    assert list(read_lines([b'{"at": 1, "ev', b'ent": {"type": "Woke"}}\n'])) == [{"at": 1, "event": {"type": "Woke"}}]


def test_segments_are_cut_when_they_are_full(tmp_path: Path) -> None:
    writer = SegmentWriter(lambda n: tmp_path / f"{n:06d}")
    for letter in b"abc":
        writer.append(bytes([letter]) * (SEGMENT_BYTES // 2 + 1))
    writer.close()
    assert [path.stat().st_size for path in sorted(tmp_path.iterdir())] == [SEGMENT_BYTES + 2, SEGMENT_BYTES // 2 + 1]


def test_a_second_writer_of_a_record_goes_on_behind_the_first(tmp_path: Path) -> None:
    for letter in (b"a", b"b"):
        writer = SegmentWriter(lambda n: tmp_path / f"{n:06d}")
        writer.append(letter * SEGMENT_BYTES)
        writer.append(letter)
        writer.close()
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert written == b"a" * (SEGMENT_BYTES + 1) + b"b" * (SEGMENT_BYTES + 1)


def test_a_closed_record_can_be_opened_again(tmp_path: Path) -> None:
    writer = SegmentWriter(lambda n: tmp_path / f"{n:06d}")
    for text in (b"one", b"two"):
        writer.append(text, durable=True)
        writer.close()
    writer.close()
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"one", b"two"]
