"""What is believed of an entry after a crash."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from runner.dataset.record import UNKNOWN, Entry, Header, Record
from runner.dataset.task import Recorded

HEADER = Header("s3://b/p", ("*.jpg",), ())


def file(name: str, size: int = 1) -> Recorded:
    return Recorded(name, f"p/{name}", size, "v", 1_700_000_000_123_456_789, "00000000")


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return Entry(tmp_path / "entry")


def test_nothing_is_known_of_nothing(entry: Entry) -> None:
    assert entry.header() == UNKNOWN
    assert not entry.is_complete()
    assert entry.last_used() == 0
    assert not entry.folder.exists()


def test_a_record_grows_and_becomes_complete(entry: Entry) -> None:
    with Record(entry, HEADER) as record:
        record.reopen()
        record.add([file("old"), file("a")])
        record.add([file("a", 2), file("b", 7)])
        record.add([])
        assert record.known(["a", "b", "c"]) == {"a": file("a", 2), "b": file("b", 7)}
        assert entry.header() == Header("s3://b/p", ("*.jpg",), (), None, 3, 10)
        record.remove(["old"])
        record.complete(1.5)
    assert entry.header() == Header("s3://b/p", ("*.jpg",), (), 1.5, 2, 9)
    assert entry.is_complete()
    assert [path.name for path in entry.folder.iterdir() if path.name != "files"] == ["record.db"]


def test_a_record_outlives_its_process(entry: Entry) -> None:
    with Record(entry, HEADER) as record:
        record.reopen()
        record.add([file("a")])
    with Record(entry, Header("another")) as record:
        assert record.known(["a"]) == {"a": file("a")}
        assert record.header() == Header("s3://b/p", ("*.jpg",), (), None, 1, 1)


def test_any_number_of_paths_may_be_asked_for(entry: Entry) -> None:
    with Record(entry, HEADER) as record:
        record.reopen()
        record.add([file(f"{number}") for number in range(5000)])
        assert len(record.known([f"{number}" for number in range(100_000)])) == 5000


def test_reopening_is_on_the_disk_before_anything_is_touched(entry: Entry) -> None:
    with Record(entry, HEADER) as record:
        record.reopen()
        record.complete(1.0)
        record.reopen()
        assert not entry.is_complete()


@pytest.mark.parametrize("text", [b"", b"{", b"SQLite format 3\x00", b"\x00" * 5000])
def test_nonsense_is_no_record(entry: Entry, text: bytes) -> None:
    entry.folder.mkdir()
    entry.record.write_bytes(text)
    assert entry.header() == UNKNOWN
    with Record(entry, HEADER) as record:
        assert record.header() == HEADER
        assert record.known(["a"]) == {}


@pytest.mark.parametrize(
    "statement",
    ["PRAGMA user_version = 2", "DROP TABLE header", "DELETE FROM header", "UPDATE header SET include = '['"],
)
def test_a_record_of_another_kind_is_none(entry: Entry, statement: str) -> None:
    with Record(entry, HEADER) as record:
        record.reopen()
        record.add([file("a")])
    with closing(sqlite3.connect(entry.record)) as database, database:
        database.execute(statement)
    assert entry.header() == UNKNOWN
    with Record(entry, HEADER) as record:
        assert record.known(["a"]) == {}


def test_only_files_that_no_row_may_name_are_in_doubt(entry: Entry) -> None:
    with Record(entry, HEADER) as record:
        assert record.names_all, "there is nothing"
        record.reopen()
        (entry.files / "a").touch()
    with Record(entry, HEADER) as record:
        assert not record.names_all, "nobody has said that it is complete"
        record.reopen()
        record.complete(1.0)
    with Record(entry, HEADER) as record:
        assert record.names_all
    entry.record.write_bytes(b"")
    with Record(entry, HEADER) as record:
        assert not record.names_all, "the record was lost"


def test_the_disk_is_open_from_before_the_first_file_until_the_end(entry: Entry) -> None:
    """The system tells of writes that failed only to those who had the file system open by then."""

    def opened() -> int:
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return links.count(entry.files)

    with Record(entry, HEADER) as record:
        record.reopen()
        assert opened() == 1
        record.add([file("a")])
        record.remove(["a"])
        record.complete(1.0)
        record.reopen()
        assert opened() == 1
    assert opened() == 0


def fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", 0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.mark.root
@pytest.mark.parametrize("reserved", [True, False])
def test_a_record_can_be_completed_on_a_full_disk(mount: Callable[[str], Path], reserved: bool) -> None:
    entry = Entry(mount("size=4m") / "entry")
    rows = [file(f"{'n' * 200}{number}") for number in range(1000)]
    with Record(entry, HEADER) as record:
        record.reopen()
        (entry.parts / "x").write_bytes(b"x" * (64 << 10))
        fill(entry.folder / "ballast")
        if not reserved:
            record.add(rows[:300])
            assert not entry.reserve.exists(), "it was given up"
            fill(entry.folder / "more")
        record.complete(1.0)
    assert entry.is_complete()


def test_a_record_that_is_being_made_is_none_yet(entry: Entry) -> None:
    """What a crash leaves: the transaction that makes the tables has not ended."""
    entry.folder.mkdir()
    with closing(sqlite3.connect(entry.record)) as database:
        database.execute("BEGIN")
        database.execute("CREATE TABLE header (source TEXT)")
        assert entry.header() == UNKNOWN
    with Record(entry, HEADER) as record:
        assert record.header() == HEADER


CRASHING = """
import os, sys
from pathlib import Path
from runner.dataset.record import Entry, Header, Record
from runner.dataset.task import Recorded
record = Record(Entry(Path(sys.argv[1])), Header("u"))
record.reopen()
record.add([Recorded("a", "a", 1, "v", 1, "")])
record.database.execute("INSERT INTO file VALUES ('b', 'b', 1, 'v', 1, '')")
record.database.execute("PRAGMA main.cache_spill = 1")
rows = [("x" * 500 + str(number),) for number in range(40000)]
record.database.executemany("INSERT INTO file VALUES (?, 'b', 1, 'v', 1, '')", rows)
os._exit(9)
"""


def test_a_crash_in_the_middle_of_a_batch_believes_the_batches_before(entry: Entry) -> None:
    done = subprocess.run([sys.executable, "-c", CRASHING, str(entry.folder)], check=False)
    assert done.returncode == 9
    assert entry.record.with_name("record.db-journal").stat().st_size > 0, "the crash left something to roll back"
    assert entry.header() == Header("u", files=1, bytes=1)
    with Record(entry, HEADER) as record:
        assert list(record.known(["a", "b"])) == ["a"]


SCRIPT = """
import sys
from pathlib import Path
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.storage.memory import MemoryStore
store = MemoryStore(objects={"a": b"1", "b": b"2"})
source = Source("memory://s", store)
DataCache(Path(sys.argv[1]), commit_every=3600).sync(source, workers=1)
if sys.argv[2:] == ["and remove"]:
    store.delete(["b"])
    DataCache(Path(sys.argv[1])).sync(source)
"""


def traced(tmp_path: Path, *arguments: str) -> list[str]:
    """The calls of a sync that make things durable, in their order."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not here")
    trace = tmp_path / "trace"
    calls = "trace=rename,syncfs,fsync,fdatasync,unlink"
    command = ["strace", "-f", "-y", "-s", "300", "-o", str(trace), "-e", calls, sys.executable, "-B", "-c", SCRIPT]
    done = subprocess.run([*command, str(tmp_path / "cache"), *arguments], check=False, capture_output=True, text=True)
    if "ptrace" in done.stderr:
        pytest.skip("tracing is not allowed here")
    assert done.returncode == 0, done.stderr
    return [_step(line) for line in _whole_calls(trace.read_text()) if "/cache/" in line]


WRITTEN = "sync record.db"
FORGET_JOURNAL = "unlink record.db-journal"


def test_files_reach_the_disk_before_their_rows(tmp_path: Path) -> None:
    steps = traced(tmp_path)
    reopened = steps.index(WRITTEN, steps.index(WRITTEN) + 1)
    placed = [steps.index("rename a"), steps.index("rename b")]
    flushed = steps.index("syncfs files")
    recorded = steps.index(WRITTEN, flushed)
    completed = steps.index(WRITTEN, recorded + 1)
    assert reopened < min(placed) < max(placed) < flushed < recorded < completed
    assert WRITTEN not in steps[min(placed) : flushed]
    assert "syncfs files" in steps[recorded:completed]
    after_a_commit = steps[completed + 1 : completed + 3]
    assert after_a_commit[0] == FORGET_JOURNAL
    assert re.fullmatch(r"sync s-[0-9a-f]{12}", after_a_commit[1]), "the end of the journal is durable too"


def test_what_was_removed_is_gone_for_good_before_the_record_says_so(tmp_path: Path) -> None:
    steps = traced(tmp_path, "and remove")
    after = steps[steps.index("unlink b") :]
    assert "syncfs files" in after[: after.index(WRITTEN)]


def _whole_calls(trace: str) -> Iterator[str]:
    """Calls in the order in which they ended; strace cuts those in two that another thread interrupts."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        thread = line.split()[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
        elif "resumed>" in line:
            yield begun.pop(thread) + line.partition("resumed>")[2]
        else:
            yield line


def _step(line: str) -> str:
    match = re.search(r"(rename|syncfs|fsync|fdatasync|unlink)\((.*)\)\s+= 0", line)
    if not match:
        return line
    call, arguments = match.groups()
    names = re.findall(r"/([^/<>\"]+)[>\"]", arguments)
    return f"{re.sub('^f(data)?sync$', 'sync', call)} {names[-1]}"
