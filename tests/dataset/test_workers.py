"""Worker processes: what they bring, how they end, and that nothing is lost when they do not."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from runner.core.diff import Wanted
from runner.dataset.cache import DataCache
from runner.dataset.fetch import SyncStopped
from runner.dataset.fleet import Fleet
from runner.dataset.source import Source
from runner.dataset.task import Failure, Outcome, Recorded
from runner.dataset.wire import Start, encode
from runner.errors import AccessDenied, CloudrunError, ObjectMissing, StoreUnreachable
from runner.storage.api import OnBytes, ignore_bytes
from runner.storage.folder import FolderStore
from runner.storage.retrying import Retry, RetryingStore, ignore_retry

SMALL = 700


class Own(FolderStore):
    """A folder that remembers what this very process fetched."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fetched: list[str] = []

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        self.fetched.append(key)
        return super().look(key, at_most=at_most)

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> None:
        self.fetched.append(key)
        super().download(key, target, version=version, on_bytes=on_bytes, note=note)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    for number in range(SMALL):
        path = folder / f"{number % 7}/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * 50)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> DataCache:
    return DataCache(tmp_path / "cache")


def opening(origin: Path) -> Callable[[Retry], RetryingStore]:
    return partial(RetryingStore, FolderStore(origin))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


# A whole sync


def test_small_files_come_by_workers_and_large_ones_by_us(cache: DataCache, origin: Path) -> None:
    (origin / "large").write_bytes(os.urandom(17 << 20))
    store = Own(origin)
    source = Source(store.url, store, opening=opening(origin))
    before = children()
    dataset = cache.sync(source)
    assert tree(dataset.path) == tree(origin)
    assert (dataset.files, dataset.fetched_files) == (SMALL + 1, SMALL + 1)
    assert dataset.bytes == dataset.fetched_bytes == sum(map(len, tree(origin).values()))
    assert store.fetched == ["large"]
    assert children() == before
    assert cache.sync(source).fetched_files == 0


def test_few_files_are_not_worth_a_process(cache: DataCache, origin: Path) -> None:
    store = Own(origin)
    cache.sync(Source(store.url, store, include=("0/*",), opening=opening(origin)))
    assert len(store.fetched) == SMALL // 7


def test_what_workers_find_wrong_is_one_error_and_the_rest_is_kept(cache: DataCache, origin: Path) -> None:
    store = Own(origin)
    elsewhere = origin.with_name("elsewhere")
    elsewhere.mkdir()
    with pytest.raises(ObjectMissing, match="could not bring"):
        cache.sync(Source(store.url, store, opening=opening(elsewhere)))
    dataset = cache.sync(Source(store.url, store))
    assert tree(dataset.path) == tree(origin)


def test_a_stop_ends_workers_and_loses_nothing(cache: DataCache, origin: Path) -> None:
    stop = threading.Event()
    store = Own(origin)
    before = children()
    with pytest.raises(SyncStopped):
        cache.sync(
            Source(store.url, store, opening=opening(origin)),
            stop=stop,
            report=lambda progress: stop.set() if progress.phase == "copying" else None,
        )
    assert children() == before
    kept = sum(len(list((entry.path / "files").rglob("*/*"))) for entry in cache.entries())
    assert cache.sync(Source(store.url, store)).fetched_files == SMALL - kept


# The processes


Posted = SimpleQueue[list[Outcome]]

MODULE = """
import os, time
from pathlib import Path
from runner.errors import StoreUnreachable
from runner.storage.folder import FolderStore
from runner.storage.retrying import RetryingStore

class Slow(FolderStore):
    def look(self, key, *, at_most=None):
        (Path(os.environ["LOG"]) / str(os.getpid())).touch()
        time.sleep(float(os.environ["DELAY"]))
        return super().look(key, at_most=at_most)

class Shaky(FolderStore):
    failed = False
    def look(self, key, *, at_most=None):
        if not Shaky.failed:
            Shaky.failed = True
            raise StoreUnreachable("shaky")
        return super().look(key, at_most=at_most)

class Noisy(FolderStore):
    def look(self, key, *, at_most=None):
        print("noise")
        raise ZeroDivisionError(key)

class Two(Exception):
    def __init__(self, first, second):
        super().__init__(first)

class Unreadable(FolderStore):
    def look(self, key, *, at_most=None):
        raise Two("odd", key)

class Babbling(FolderStore):
    def look(self, key, *, at_most=None):
        import sys
        os.write(int(sys.argv[1]), b"nonsense, and not pickled")
        time.sleep(300)

class Panicking(FolderStore):
    def look(self, key, *, at_most=None):
        raise SystemExit("oh")

def unreadable(retry):
    return RetryingStore(Unreadable(Path(os.environ["ORIGIN"])), retry)

def babbling(retry):
    return RetryingStore(Babbling(Path(os.environ["ORIGIN"])), retry)

def panicking(retry):
    return RetryingStore(Panicking(Path(os.environ["ORIGIN"])), retry)

def slow(retry):
    return RetryingStore(Slow(Path(os.environ["ORIGIN"])), retry)

def shaky(retry):
    return RetryingStore(Shaky(Path(os.environ["ORIGIN"])), retry)

def noisy(retry):
    return RetryingStore(Noisy(Path(os.environ["ORIGIN"])), retry)

def closed(retry):
    from runner.errors import AccessDenied
    raise AccessDenied("no entry", "ask the owner")
"""


@pytest.fixture
def stores(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with openings, which workers can import as well."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "stores_for_workers.py").write_text(MODULE)
    (tmp_path / "log").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("ORIGIN", str(origin))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DELAY", "0")
    monkeypatch.syspath_prepend(str(folder))
    yield "stores_for_workers"
    sys.modules.pop("stores_for_workers", None)


@pytest.fixture
def start(stores: str, tmp_path: Path) -> Callable[[str], Start]:
    def make(name: str) -> Start:
        files, parts = tmp_path / "files", tmp_path / "parts"
        files.mkdir()
        parts.mkdir()
        return Start(getattr(__import__(stores), name), 60.0, files, parts, threads=2)

    return make


def wanted(origin: Path, count: int) -> list[Wanted]:
    found = sorted(FolderStore(origin).list(), key=lambda info: info.key)[:count]
    return [Wanted(info.key, info.key, info.size, info.version) for info in found]


def test_each_task_is_answered_once(start: Callable[[str], Start], origin: Path, tmp_path: Path) -> None:
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("slow"), 2, posted.put, ignore_retry)
    tasks = wanted(origin, 100)
    fleet.hand(tasks)
    outcomes: list[Outcome] = []
    while len(outcomes) < 100:
        outcomes += posted.get(timeout=60)
    fleet.close()
    assert posted.empty()
    recorded = [outcome for outcome in outcomes if isinstance(outcome, Recorded)]
    assert sorted(outcome.key for outcome in recorded) == sorted(task.key for task in tasks)
    assert len(list((tmp_path / "log").iterdir())) == 2, "both processes took part"
    assert tree(tmp_path / "files") == {task.key: (origin / task.key).read_bytes() for task in tasks}


def test_retries_are_told(start: Callable[[str], Start], origin: Path) -> None:
    posted: Posted = SimpleQueue()
    told: list[tuple[str, str]] = []

    def tell(operation: str, error: CloudrunError, _wait: float) -> None:
        told.append((operation, str(error)))

    fleet = Fleet(start("shaky"), 1, posted.put, tell)
    fleet.hand(wanted(origin, 1))
    assert isinstance(posted.get(timeout=60)[0], Recorded)
    fleet.close()
    assert told == [("read", "shaky")]


def test_our_own_faults_come_through(start: Callable[[str], Start], origin: Path) -> None:
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("noisy"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    [failure] = posted.get(timeout=60)
    fleet.close()
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, ZeroDivisionError)


@pytest.mark.parametrize(("name", "words"), [("unreadable", "Two: odd"), ("panicking", "SystemExit('oh')")])
def test_errors_that_cannot_be_sent_are_told_in_words(
    start: Callable[[str], Start], origin: Path, name: str, words: str
) -> None:
    posted: Posted = SimpleQueue()
    fleet = Fleet(start(name), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    [failure] = posted.get(timeout=60)
    fleet.close()
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, RuntimeError)
    assert str(failure.error) == words


def test_an_answer_that_nobody_can_read_is_an_error_and_ends_the_worker(
    start: Callable[[str], Start], origin: Path
) -> None:
    posted: Posted = SimpleQueue()
    before = children()
    fleet = Fleet(start("babbling"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    [failure] = posted.get(timeout=60)
    assert isinstance(failure, Failure)
    assert "cannot be read" in str(failure.error)
    assert children() == before
    fleet.close()


def test_what_is_printed_before_the_worker_begins_is_no_answer(
    start: Callable[[str], Start], stores: str, origin: Path, tmp_path: Path
) -> None:
    (tmp_path / "modules/sitecustomize.py").write_text("print('good morning', flush=True)\n")
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("slow"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    assert isinstance(posted.get(timeout=60)[0], Recorded)
    fleet.close()


def test_a_worker_that_hangs_holds_up_nobody(start: Callable[[str], Start], origin: Path, tmp_path: Path) -> None:
    posted: Posted = SimpleQueue()
    before = children()
    fleet = Fleet(start("slow"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    assert isinstance(posted.get(timeout=60)[0], Recorded)
    [log] = (tmp_path / "log").iterdir()
    os.kill(int(log.name), signal.SIGSTOP)
    for _ in range(20):
        fleet.hand(wanted(origin, SMALL))
    fleet.close()
    assert children() == before


def test_workers_that_cannot_be_started_leave_none_behind(start: Callable[[str], Start], tmp_path: Path) -> None:
    """With room for the descriptors of one worker, not of two."""
    beginning = start("slow")
    before, limits = children(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        fillers = [held.enter_context(open(os.devnull)) for _ in range(64)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1].fileno() + 1 + 7, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                Fleet(beginning, 2, SimpleQueue[list[Outcome]]().put, ignore_retry)
            assert children() == before
            Fleet(beginning, 1, SimpleQueue[list[Outcome]]().put, ignore_retry).close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert children() == before


def test_without_workers_our_own_threads_bring_the_files(
    cache: DataCache, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    store = Own(origin)
    assert tree(cache.sync(Source(store.url, store, opening=opening(origin))).path) == tree(origin)
    assert len(store.fetched) == SMALL


def test_a_store_that_cannot_be_opened_says_why(start: Callable[[str], Start], origin: Path) -> None:
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("closed"), 1, posted.put, ignore_retry)
    [failure] = posted.get(timeout=60)
    fleet.close()
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, AccessDenied)
    assert failure.error.hint == "ask the owner"


def test_a_worker_that_is_killed_is_an_error(
    start: Callable[[str], Start], origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAY", "300")
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("slow"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 100))
    wait_for(lambda: any((tmp_path / "log").iterdir()))
    [log] = (tmp_path / "log").iterdir()
    os.kill(int(log.name), signal.SIGKILL)
    [failure] = posted.get(timeout=60)
    fleet.hand(wanted(origin, 100))
    fleet.close()
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, StoreUnreachable)
    assert "ended with -9" in failure.error.message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_for_the_parent(
    start: Callable[[str], Start], origin: Path, tmp_path: Path, number: signal.Signals
) -> None:
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("slow"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    assert isinstance(posted.get(timeout=60)[0], Recorded)
    [log] = (tmp_path / "log").iterdir()
    os.kill(int(log.name), number)
    fleet.hand(wanted(origin, 2)[1:])
    assert isinstance(posted.get(timeout=60)[0], Recorded)
    fleet.close()


PARENT = """
import os, sys
from pathlib import Path
import stores_for_workers
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.storage.folder import FolderStore
store = FolderStore(Path(os.environ["ORIGIN"]))
DataCache(Path(sys.argv[1])).sync(Source(store.url, store, opening=stores_for_workers.slow))
"""


def test_workers_die_with_their_parent(
    stores: str, cache: DataCache, origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAY", "300")
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "cache")]) as process:
        wait_for(lambda: any((tmp_path / "log").iterdir()))
        pids = [int(path.name) for path in (tmp_path / "log").iterdir()]
        process.kill()
    wait_for(lambda: not any(map(is_alive, pids)))
    store = FolderStore(origin)
    assert tree(cache.sync(Source(store.url, store)).path) == tree(origin)


def test_credentials_are_neither_arguments_nor_environment(
    start: Callable[[str], Start], origin: Path, tmp_path: Path
) -> None:
    """What comes by the pipe is nowhere that other users or core dumps of the environment would show it."""
    posted: Posted = SimpleQueue()
    fleet = Fleet(start("slow"), 1, posted.put, ignore_retry)
    fleet.hand(wanted(origin, 1))
    posted.get(timeout=60)
    [log] = (tmp_path / "log").iterdir()
    arguments = Path(f"/proc/{log.name}/cmdline").read_bytes().split(b"\0")
    environment = dict(
        line.split("=", 1) for line in Path(f"/proc/{log.name}/environ").read_text().split("\0") if "=" in line
    )
    fleet.close()
    assert arguments[1:4] == [b"-P", b"-m", b"runner.dataset.worker"]
    assert arguments[4].isdigit()
    assert arguments[5:] == [b""]
    assert environment.keys() <= os.environ.keys()


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    error = ValueError("odd")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    [failure] = pickle.loads(encode([Failure("k", error)]))
    assert failure.key == "k"
    assert str(failure.error) == "ValueError: odd"
