"""``mode: copy``: bring a source from any object store into its entry of the cache, and only what is not there yet."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

from runner.clock import Clock
from runner.core.diff import Fetch, Plan, Selection, plan
from runner.dataset.fetch import Fetcher, SyncStopped, content_of
from runner.dataset.parallel import Crew, Failure, Tick
from runner.dataset.record import Entry, Header, Progress, Recorded, sync_file_system
from runner.dataset.source import Source, conflict_error, nothing_error, objects_of
from runner.errors import AccessDenied, CloudrunError, DiskFull, NotYetError
from runner.storage.local import free_bytes, no_room, translating

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip")
BATCH_FILES = 2000
BATCH_BYTES = 256 << 20
REPORT_EVERY = 0.5
"""Seconds between two reports of a running copy."""

NAMED_AT_MOST = 3
"""How many files one error message names."""

Phase = Literal["waiting", "listing", "checking", "copying", "done"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A complete local copy: ``path`` is the folder that the trainer sees. ``seconds`` is what the sync took."""

    path: Path
    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """How far a sync is. Totals are 0 until they are known."""

    phase: Phase
    files: int = 0
    files_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    message: str = ""


Report = Callable[[SyncProgress], None]
"""Called from the thread that syncs, a few times per second at most."""


@dataclass(frozen=True, slots=True)
class Need:
    """Room for what is to be written: bytes of content, bytes of whole blocks on the disk, number of files."""

    bytes: int
    on_disk: int
    files: int


@dataclass(frozen=True, slots=True)
class Sync:
    """One synchronisation of one entry, whose lock the caller holds.

    ``make_space`` raises DiskFull when it cannot; ``commit_every`` is in seconds.
    """

    source: Source
    entry: Entry
    make_space: Callable[[Need], None]
    clock: Clock
    report: Report
    stop: threading.Event
    workers: int
    commit_every: float

    def run(self) -> Dataset:
        """Compare, remove what has gone, fetch what is missing, complete the record.

        Raises DataError, NotYetError, DiskFull, SyncStopped, or the error of the files that could not be fetched. What
        was fetched until then is kept and recorded.
        """
        started = self.clock.now()
        with translating(str(self.entry.folder)):
            known = self.entry.read()
            todo = self._plan(known)
            self._refuse(todo)
            record = known if self._is_up_to_date(todo) else self._carry_out(todo, known)
        dataset = self._dataset(todo, record, self.clock.now() - started)
        fetched = dataset.fetched_files, dataset.fetched_bytes
        self.report(SyncProgress("done", fetched[0], fetched[0], fetched[1], fetched[1], self.source.url))
        return dataset

    def _plan(self, known: Mapping[str, Recorded]) -> Plan:
        self.report(SyncProgress("listing", message=self.source.url))
        listing = list(self._unless_stopped(objects_of(self.source)))
        return plan(
            listing,
            known,
            prefix=self.source.prefix,
            selection=Selection(self.source.include, self.source.exclude),
            damaged=self._damaged(known),
        )

    def _refuse(self, todo: Plan) -> None:
        """Raise for what makes no sense, before anything is touched."""
        if todo.conflicts:
            raise conflict_error(self.source, todo.conflicts)
        if not todo.fetch and not todo.keep:
            raise nothing_error(self.source, todo)
        keys = chain((file.key for file in todo.fetch), (file.key for file in todo.keep))
        archive = next((key for key in keys if key.lower().endswith(ARCHIVES)), None)
        if archive and self.source.extract != "never":
            raise NotYetError(
                f"{self.source.url}: unpacking archives is not in this version yet ({archive})",
                "`extract: never` brings them as they are",
            )

    def _is_up_to_date(self, todo: Plan) -> bool:
        folders = all((self.entry.files / folder.path).is_dir() for folder in todo.folders)
        return not todo.fetch and not todo.remove and folders and self.entry.is_complete()

    def _carry_out(self, todo: Plan, known: Mapping[str, Recorded]) -> dict[str, Recorded]:
        self.make_space(self._need(todo, known))
        header = Header(self.source.url, self.source.include, self.source.exclude)
        fetcher = Fetcher(self.source, self.entry, self.stop)
        with closing(self.entry.reopen(header, known.values())) as progress:
            for gone in todo.remove:
                fetcher.remove(gone.path)
            for folder in todo.folders:
                fetcher.make_folder(self.entry.files / folder.path)
            record = {file.path: known[file.path] for file in todo.keep}
            record |= self._fetch_all(todo, fetcher, progress)
        if todo.remove or todo.folders:
            # A power cut must not bring back what no record will name any more.
            sync_file_system(self.entry.files)
        self.entry.complete(replace(header, completed_at=self.clock.now()), record)
        return record

    def _need(self, todo: Plan, known: Mapping[str, Recorded]) -> Need:
        block = os.statvfs(self.entry.folder).f_frsize
        coming = [file.size for file in todo.fetch]
        going = [known[gone.path].size for gone in todo.remove]
        going += [known[file.path].size for file in todo.fetch if file.reason == "changed"]
        on_disk = _in_blocks(coming, block) - _in_blocks(going, block)
        return Need(sum(coming) - sum(going), on_disk, len(coming) - len(going))

    def _dataset(self, todo: Plan, record: Mapping[str, Recorded], seconds: float) -> Dataset:
        fetched = sum(record[file.path].size for file in todo.fetch)
        files = len(todo.fetch) + len(todo.keep)
        return Dataset(self.entry.files, files, todo.totals.keep_bytes + fetched, len(todo.fetch), fetched, seconds)

    def _damaged(self, known: Mapping[str, Recorded]) -> set[str]:
        """Paths of recorded files that are not, or no longer, what was written."""
        self.report(SyncProgress("checking", files_total=len(known), message=self.source.url))
        files = str(self.entry.files)
        damaged = {file.path for file in self._unless_stopped(known.values()) if not _looks_right(file, files)}
        if self.source.verify:
            damaged |= self._wrong_content([file for file in known.values() if file.path not in damaged])
        return damaged

    def _is_wrong(self, file: Recorded) -> tuple[str, bool]:
        try:
            return file.path, content_of(self.entry.files / file.path).crc32c != file.crc32c
        except OSError:
            # What cannot be read is no good either, and the cure is the same.
            return file.path, True

    def _wrong_content(self, files: list[Recorded]) -> set[str]:
        crew = Crew(files, self._is_wrong, workers=self.workers, stop=self.stop)
        wrong: dict[str, bool] = {}
        said = Every(self.clock, REPORT_EVERY)
        with closing(crew.results(REPORT_EVERY)) as results:
            for result in results:
                if isinstance(result, Failure):
                    raise result.error
                if not isinstance(result, Tick):
                    wrong.update([result])
                if said.is_due():
                    self.report(SyncProgress("checking", len(wrong), len(files), message=self.source.url))
        self._raise_if_stopped()
        return {path for path, bad in wrong.items() if bad}

    def _fetch_all(self, todo: Plan, fetcher: Fetcher, progress: Progress) -> dict[str, Recorded]:
        crew = Crew(todo.fetch, lambda item: fetcher.fetch(item, crew.dropped), workers=self.workers, stop=self.stop)
        batch = Batch(progress, self.clock, self.commit_every)
        done: dict[str, Recorded] = {}
        failures: list[Failure[Fetch]] = []
        said = Every(self.clock, REPORT_EVERY)
        try:
            with closing(crew.results(min(REPORT_EVERY, self.commit_every))) as results:
                for result in results:
                    if isinstance(result, Failure):
                        failures.append(result)
                    elif not isinstance(result, Tick):
                        done[result.path] = result
                        batch.add(result)
                    batch.commit_if_due()
                    if said.is_due():
                        self.report(self._progress(todo, len(done), fetcher.meter.total()))
        finally:
            for result in crew.rest():
                batch.add(result)
            batch.commit()
        self._raise_if_stopped()
        if failures:
            left = sum(item.size for item in todo.fetch if item.path not in done)
            raise _one_error(failures, self.entry.folder, left)
        return done

    def _progress(self, todo: Plan, files: int, moved: int) -> SyncProgress:
        totals = todo.totals
        return SyncProgress("copying", files, totals.fetch_files, moved, totals.fetch_bytes, self.source.url)

    def _unless_stopped(self, items: Iterable[_T]) -> Iterator[_T]:
        for number, item in enumerate(items):
            if number % 256 == 0:
                self._raise_if_stopped()
            yield item

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise SyncStopped(f"stopped while bringing {self.source.url}", "the same command goes on from here")


class Every:
    """Says once per ``seconds`` that it is time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._next = clock.now()

    def is_due(self) -> bool:
        now = self._clock.now()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Batch:
    """Files that are in place and not on record yet."""

    def __init__(self, progress: Progress, clock: Clock, every: float) -> None:
        self._progress = progress
        self._every = Every(clock, every)
        self._files: list[Recorded] = []
        self._bytes = 0

    def add(self, file: Recorded) -> None:
        self._files.append(file)
        self._bytes += file.size

    def commit_if_due(self) -> None:
        full = len(self._files) >= BATCH_FILES or self._bytes >= BATCH_BYTES
        if full or self._every.is_due():
            self.commit()

    def commit(self) -> None:
        # Forgotten first: a record that failed half way is not tried again.
        files, self._files, self._bytes = self._files, [], 0
        self._progress.commit(files)


def _looks_right(file: Recorded, folder: str) -> bool:
    """Whether the file below ``folder`` has the size and the time that it was given when it was written."""
    try:
        info = os.lstat(f"{folder}/{file.path}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns)


def _in_blocks(sizes: list[int], block: int) -> int:
    return sum(-(-size // block) * block for size in sizes)


def _gravity(failure: Failure[Fetch]) -> int:
    """Lower is graver: our own faults, then what no other file would survive either."""
    match failure.error:
        case DiskFull():
            return 1
        case AccessDenied():
            return 2
        case CloudrunError():
            return 3
        case _:
            return 0


def _one_error(failures: list[Failure[Fetch]], folder: Path, left: int) -> Exception:
    """One error for all: of the gravest kind, naming the first few files. ``left`` bytes have not arrived."""
    gravest = min(failures, key=_gravity).error
    if not isinstance(gravest, CloudrunError):
        return gravest
    if isinstance(gravest, DiskFull):
        return no_room(f"on {folder}", left, free_bytes(folder), "what has arrived is kept; make room and run again")
    named = "; ".join(f"{failure.item.key}: {failure.error}" for failure in failures[:NAMED_AT_MOST])
    more = f"; and {len(failures) - NAMED_AT_MOST} more" if len(failures) > NAMED_AT_MOST else ""
    return type(gravest)(f"could not bring {named}{more}", gravest.hint)
