"""``mode: copy``: bring a source from any object store into its entry of the cache, and only what is not there yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from runner.clock import Clock
from runner.core.diff import Wanted, flaw
from runner.dataset.compare import Comparison
from runner.dataset.crew import ENDING
from runner.dataset.fetch import Places, SyncStopped
from runner.dataset.leftovers import paths_below
from runner.dataset.listing import PAGE, Lister, ListingEnded, Page
from runner.dataset.pace import Every, Rate
from runner.dataset.record import Entry, Record
from runner.dataset.room import Room
from runner.dataset.source import NOTHING_LEFT_OUT, LeftOut, Source, nothing_error
from runner.dataset.task import Check, Checked, Failure, Outcome, Recorded, Task, as_exception
from runner.dataset.teams import Answer, Teams
from runner.dataset.worklist import Amount, Todo, Worklist
from runner.errors import AccessDenied, CloudrunError, DataError, DiskFull
from runner.storage.local import free_bytes, no_room

BATCH_FILES = 2000
BATCH_BYTES = 256 << 20
REPORT_EVERY = 0.5
"""Seconds between two reports of a running copy."""

TICK = 0.2
"""Seconds after which a sync to which nothing happens looks up."""

MANY = 500
"""Small files that wait, from which on worker processes are worth their start."""

NAMED_AT_MOST = 3
"""How many files one error message names."""

Phase = Literal["waiting", "listing", "checking", "copying", "done"]


@dataclass(frozen=True, slots=True)
class Dataset:
    """A complete local copy: ``path`` is the folder that the trainer sees. ``seconds`` is what the sync took."""

    path: Path
    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    seconds: float
    left_out: LeftOut = NOTHING_LEFT_OUT


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """How far a sync is.

    listed    objects that the source has told of; all of them once ``complete``: until then totals are "at least"
    rate      bytes per second, lately
    eta       seconds until the end, or None where nobody can know
    left_out  objects that cannot be files here; told at the end
    """

    phase: Phase
    files: int = 0
    files_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    message: str = ""
    listed: int = 0
    complete: bool = False
    rate: float = 0.0
    eta: float | None = None
    left_out: LeftOut = NOTHING_LEFT_OUT


Report = Callable[[SyncProgress], None]
"""Called from the thread that syncs, a few times per second at most."""


class _FirstFailure(Exception):
    """A task has failed: nothing more is handed out."""


class Sync:
    """One synchronisation of one entry, whose lock the caller holds.

    One thread decides and keeps the record; another lists; others, here or in worker processes, fetch. All that they
    have to tell comes to one inbox. ``commit_every``: seconds after which fetched files are put on record.
    """

    def __init__(
        self,
        source: Source,
        entry: Entry,
        record: Record,
        worklist: Worklist,
        room: Room,
        *,
        clock: Clock,
        report: Report,
        stop: threading.Event,
        workers: int,
        commit_every: float,
    ) -> None:
        self._source = source
        self._entry = entry
        self._record = record
        self._worklist = worklist
        self._room = room
        self._clock = clock
        self._report = report
        self._stop = stop
        self._tick = min(TICK, commit_every)
        self._inbox = SimpleQueue[Page | ListingEnded | Answer]()
        self._comparison = Comparison(source, entry, record, worklist)
        self._places = Places(entry.files)
        self._batch = Batch(record, clock, commit_every)
        self._said = Every(clock, REPORT_EVERY)
        self._rate = Rate(clock)
        self._teams = Teams(source, entry, workers, stop, self._inbox.put)
        self._pages = 0
        self._listed = self._settled = self._changing = False
        self._failures: list[Failure] = []
        self._handed = self._fetched = Amount()
        self._checked = 0

    def run(self) -> Dataset:
        """List, compare, fetch meanwhile, remove what has gone, complete the record.

        Raises DataError, NotYetError, DiskFull, SyncStopped, or the error of the files that could not be fetched. What
        was fetched until then is kept and recorded.
        """
        started = self._clock.now()
        self._report(SyncProgress("listing", message=self._source.url))
        self._work()
        self._finish()
        header, left_out = self._record.header(), self._comparison.left_out
        files, size = self._fetched.files, self._fetched.bytes
        self._report(SyncProgress("done", files, files, size, size, self._source.url, left_out=left_out))
        seconds = self._clock.now() - started
        return Dataset(self._entry.files, header.files, header.bytes, files, size, seconds, left_out)

    # The course of things

    def _work(self) -> None:
        lister = self._lister = Lister(self._source, self._inbox.put)
        try:
            self._take_course()
        except _FirstFailure:
            # What takes long goes on from where it was, the next time.
            self._teams.drop()
        except BaseException:
            self._teams.drop()
            raise
        finally:
            until = time.monotonic() + ENDING
            self._teams.end()
            lister.end()
            self._teams.join(until)
            lister.join(until)
            self._keep_what_came()
        self._raise_if_stopped()
        if self._failures:
            left = self._comparison.to_fetch.bytes - self._fetched.bytes
            raise _one_error(self._failures, self._entry.folder, left)

    def _take_course(self) -> None:
        while not self._listed:
            self._turn()
        self._settle()
        self._bring_the_rest()
        if self._worklist.waiting(Todo.BLOCKED):
            # A file that came before the listing was complete may stand where, as it turned out, a folder is needed.
            self._batch.commit()
            self._remove_gone()
            self._worklist.unblock()
            self._bring_the_rest()

    def _settle(self) -> None:
        """The listing is complete: refuse what makes no sense, remove what has gone, make room for the rest."""
        self._comparison.leave_out(self._worklist.leave_out_contended())
        if not self._worklist.count():
            raise self._nothing()
        self._comparison.to_fetch = self._handed + self._worklist.still_to_fetch()
        self._remove_gone()
        self._remove_strangers()
        self._comparison.remove_useless_parts()
        if not self._room.fits(self._comparison.need):
            while self._teams.flying:
                self._turn()
            self._batch.commit()
            self._room.make(self._comparison.still_needed())
        self._settled = True

    def _bring_the_rest(self) -> None:
        self._hand_out()
        if self._teams.flying:
            self._report(self._progress())
        while self._teams.flying:
            self._turn()

    def _turn(self) -> None:
        """Take what has come, or wait a little for something; hand out more."""
        self._raise_if_stopped()
        for message in self._messages():
            self._take(message)
        self._batch.commit_if_due()
        if self._said.is_due():
            self._report(self._progress())
        if self._failures:
            raise _FirstFailure
        self._hand_out()

    def _finish(self) -> None:
        if self._record.header().completed_at is None:
            self._change()
        for path in self._worklist.folders():
            if not (self._entry.files / path).is_dir():
                self._change()
                self._places.make(f"{self._entry.files}/{path}")
        if self._changing:
            self._record.complete(self._clock.now())

    # What comes in

    def _messages(self) -> Iterator[Page | ListingEnded | Answer]:
        with suppress(Empty):
            yield self._inbox.get(timeout=self._tick)
            # No more than there are now: each page that is taken makes room for another.
            for _ in range(self._inbox.qsize()):
                yield self._inbox.get_nowait()

    def _take(self, message: Page | ListingEnded | Answer) -> None:
        match message:
            case Page(objects):
                self._pages += 1
                self._comparison.add(objects)
                self._lister.release()
            case ListingEnded(error):
                if error:
                    raise error
                self._listed = True
            case Answer():
                self._teams.answered(message)
                for outcome in message.outcomes:
                    self._take_outcome(outcome)

    def _take_outcome(self, outcome: Outcome) -> None:
        match outcome:
            case Recorded():
                self._batch.add(outcome)
                self._fetched += Amount(1, outcome.size)
            case Checked(wanted, sound):
                self._checked += 1
                if not sound:
                    self._worklist.put_back(wanted)
                    self._comparison.to_fetch += Amount(1, wanted.size)
            case Failure(error=SyncStopped()):
                # It was we who wanted that, and for another reason.
                pass
            case Failure():
                self._failures.append(outcome)

    def _keep_what_came(self) -> None:
        """Put on record what came when nobody waited any more."""
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Answer):
                self._take(message)
        self._batch.commit()

    # What goes out

    def _hand_out(self) -> None:
        if not self._may_hand_out():
            return
        if self._teams.lack_workers and self._worklist.waiting(Todo.SMALL) > MANY:
            self._teams.call_workers()
        for todo in (Todo.CHECK, Todo.BIG, Todo.SMALL):
            free = self._teams.free(todo) if self._worklist.waiting(todo) else 0
            items = self._worklist.take(todo, free) if free else []
            if items:
                self._teams.hand(todo, self._tasks(todo, items))

    def _may_hand_out(self) -> bool:
        """A short listing is looked at as a whole first. Of a long one the files come meanwhile, unless something is in
        question that only its end tells: whose a name is, and whether evicting others would make room enough.
        """
        if self._settled or self._listed or self._pages <= 1:
            return self._settled
        clear = self._record.names_all and not self._worklist.folds
        return clear and self._room.fits(self._comparison.need)

    def _tasks(self, todo: Todo, items: list[Wanted]) -> list[Task]:
        if todo is Todo.CHECK:
            known = self._record.known([item.path for item in items])
            return [Check(item, known[item.path].crc32c) for item in items]
        self._change()
        self._handed += Amount(len(items), sum(item.size for item in items))
        return list(items)

    def _change(self) -> None:
        """Before the first change to the files."""
        if not self._changing:
            self._record.reopen()
            self._changing = True

    def _remove_gone(self) -> None:
        for paths in self._worklist.gone():
            self._raise_if_stopped()
            self._change()
            for path in paths:
                if not flaw(path) and not self._worklist.is_place_of_another(path):
                    self._places.remove(path)
            self._record.remove(paths)

    def _remove_strangers(self) -> None:
        """Files that a process which died has put into their places and not on record: they may have gone since."""
        if self._record.names_all:
            return
        self._change()
        paths = paths_below(self._entry.files)
        while some := list(islice(paths, PAGE)):
            self._raise_if_stopped()
            for path in self._worklist.strangers([path for path in some if not path.endswith("/")]):
                self._places.remove(path)
            for path in some:
                if path.endswith("/"):
                    self._places.remove_empty(path)

    def _nothing(self) -> DataError:
        """What to say of a source without files. The store is asked for what is near; a stop does not wait for it."""
        answer = Future[DataError]()
        comparison = self._comparison

        def ask() -> None:
            try:
                answer.set_result(nothing_error(self._source, comparison.unselected, comparison.left_out))
            except BaseException as error:  # noqa: BLE001 - a thread's edge: the error becomes a value
                answer.set_exception(as_exception(error))

        threading.Thread(target=ask, name="look around", daemon=True).start()
        while not wait([answer], self._tick).done:
            self._raise_if_stopped()
        return answer.result()

    def _progress(self) -> SyncProgress:
        comparison, moved = self._comparison, self._teams.meter.total()
        rate, total = self._rate.after(moved), comparison.to_fetch
        phase: Phase = "copying" if self._handed.files else "checking" if self._checked else "listing"
        return SyncProgress(
            phase,
            self._fetched.files if self._handed.files else self._checked,
            total.files if self._handed.files else comparison.to_check,
            moved,
            total.bytes,
            self._source.url if phase != "copying" else "",
            listed=comparison.objects,
            complete=self._listed,
            rate=rate,
            eta=(total.bytes - moved) / rate if self._listed and rate else None,
        )

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise SyncStopped(f"stopped while bringing {self._source.url}", "the same command goes on from here")


class Batch:
    """Files that are in place and not on record yet."""

    def __init__(self, record: Record, clock: Clock, every: float) -> None:
        self._record = record
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
        self._record.add(files)


def _gravity(failure: Failure) -> int:
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


def _one_error(failures: list[Failure], folder: Path, left: int) -> Exception:
    """One error for all: of the gravest kind, naming the first few files. ``left`` bytes have not arrived."""
    gravest = min(failures, key=_gravity).error
    if not isinstance(gravest, CloudrunError):
        return gravest
    if isinstance(gravest, DiskFull):
        return no_room(f"on {folder}", left, free_bytes(folder), "what has arrived is kept; make room and run again")
    named = "; ".join(f"{failure.key}: {failure.error}" for failure in failures[:NAMED_AT_MOST])
    more = f"; and {len(failures) - NAMED_AT_MOST} more" if len(failures) > NAMED_AT_MOST else ""
    return type(gravest)(f"could not bring {named}{more}", gravest.hint)
