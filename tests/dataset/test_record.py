"""What is believed of an entry after a crash."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.dataset.record import UNKNOWN, Entry, Header, Recorded

HEADER = Header("s3://b/p", ("*.jpg",), ())


def file(name: str, size: int = 1) -> Recorded:
    return Recorded(name, f"p/{name}", size, "v", 1_700_000_000_123_456_789, "00000000")


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return Entry(tmp_path / "entry")


def test_nothing_is_known_of_nothing(entry: Entry) -> None:
    assert entry.read() == {}
    assert entry.header() == UNKNOWN
    assert not entry.is_complete()
    assert entry.last_used() == 0


def test_progress_grows_and_becomes_the_manifest(entry: Entry) -> None:
    progress = entry.reopen(HEADER, [file("old")])
    progress.commit([file("a"), file("b", 7)])
    progress.commit([])
    assert list(entry.read()) == ["old", "a", "b"]
    assert entry.header() == Header("s3://b/p", ("*.jpg",), (), None, 3, 9)
    progress.close()
    done = Header("s3://b/p", ("*.jpg",), (), 1.5)
    entry.complete(done, {"a": file("a"), "b": file("b", 7)})
    assert entry.read() == {"a": file("a"), "b": file("b", 7)}
    assert entry.header() == Header("s3://b/p", ("*.jpg",), (), 1.5, 2, 8)
    assert not entry.progress.exists()
    assert json.loads(entry.manifest.read_bytes())["format"] == 1


def test_an_empty_manifest_is_json_too(entry: Entry) -> None:
    entry.reopen(HEADER, []).close()
    entry.complete(Header("u", (), (), 1.0), {})
    assert json.loads(entry.manifest.read_bytes())["files"] == []
    assert entry.header() == Header("u", (), (), 1.0)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_line_ends_the_record(entry: Entry, cut: int) -> None:
    progress = entry.reopen(HEADER, [])
    progress.commit([file("a"), file("b")])
    progress.close()
    os.truncate(entry.progress, entry.progress.stat().st_size - cut)
    assert list(entry.read()) == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]\n", "null\n", '{"source": "x"}', '{"source": "x"}\n{"path": 1}\n'])
def test_nonsense_is_no_record(entry: Entry, text: str) -> None:
    entry.folder.mkdir()
    entry.progress.write_text(text)
    entry.manifest.write_text(text)
    assert entry.read() == {}
    assert entry.header().completed_at is None


def test_hostile_paths_are_not_believed(entry: Entry) -> None:
    with_hostile = [file("../x"), file("/etc/x"), file("a/../../x"), file("fine")]
    entry.reopen(HEADER, with_hostile).close()
    assert list(entry.read()) == ["fine"]


def test_a_crash_between_record_and_manifest_believes_the_manifest(entry: Entry) -> None:
    entry.reopen(HEADER, []).close()
    entry.complete(Header("u", (), (), 1.0), {"a": file("a")})
    entry.progress.write_text('{"source": "u"}\n')
    assert list(entry.read()) == ["a"]
    entry.sweep()
    assert not entry.progress.exists()
    assert entry.is_complete()


SCRIPT = """
import sys
from collections.abc import Iterator
from pathlib import Path
from runner.clock import SystemClock
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
    calls = "trace=rename,syncfs,fsync,unlink"
    command = ["strace", "-f", "-y", "-s", "300", "-o", str(trace), "-e", calls, sys.executable, "-B", "-c", SCRIPT]
    done = subprocess.run([*command, str(tmp_path / "cache"), *arguments], check=False, capture_output=True, text=True)
    if "ptrace" in done.stderr:
        pytest.skip("tracing is not allowed here")
    assert done.returncode == 0, done.stderr
    return [_step(line) for line in _whole_calls(trace.read_text()) if "/cache/" in line]


def test_files_reach_the_disk_before_their_lines(tmp_path: Path) -> None:
    steps = traced(tmp_path)
    starts = [number for number, step in enumerate(steps) if step == "syncfs files"]
    for start in starts:
        # Meanwhile the other thread may put the next file in place.
        following = [step for step in steps[start + 1 :] if step != "rename b"]
        assert following[0] == "fsync progress.jsonl"
    assert steps.index("rename a") < steps.index("syncfs files")
    assert (
        steps.index("rename b")
        < starts[-1]
        < steps.index("rename manifest.json")
        < steps.index("unlink progress.jsonl")
    )
    before_manifest = steps[: steps.index("rename manifest.json")]
    assert "part" in before_manifest[-1]


def test_what_was_removed_is_gone_for_good_before_the_manifest_says_so(tmp_path: Path) -> None:
    steps = traced(tmp_path, "and remove")
    after = steps[steps.index("unlink b") :]
    assert "syncfs files" in after[: after.index("rename manifest.json")]


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
    match = re.search(r"(rename|syncfs|fsync|unlink)\((.*)\)\s+= 0", line)
    if not match:
        return line
    call, arguments = match.groups()
    names = re.findall(r"/([^/<>\"]+)[>\"]", arguments)
    return f"{call} {names[-1]}"
