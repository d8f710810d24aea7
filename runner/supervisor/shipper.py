"""Carries logs, journal and status to the store every few seconds, so that they outlive the machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from runner.checkpoint.layout import LocalLayout, Segment, StoreLayout
from runner.clock import Clock
from runner.core.events import Progressed
from runner.core.ledger import Account, fold, status
from runner.core.record import Entry, Line, is_worth_a_line, to_line
from runner.errors import CloudrunError
from runner.files import write_atomically
from runner.storage.api import ObjectStore
from runner.supervisor.history import journal_lines, local_segments, stored_segments

SHORTEST_PAUSE = 0.5


class Shipper:
    """One thread. Segments are small and go as whole objects; a segment that has grown is written again.

    Failures never reach the loop: they are told once through ``complain`` and tried again next time.
    """

    def __init__(
        self,
        store: ObjectStore,
        local: LocalLayout,
        session: str,
        *,
        every: float,
        clock: Clock,
        redact: Callable[[str], str],
        complain: Callable[[str], None],
    ) -> None:
        self._store = store
        self._local = local
        self._keys = StoreLayout(local.job)
        self._session = session
        self._every = every
        self._clock = clock
        self._redact = redact
        self._complain = complain
        self._lock = threading.Lock()
        self._pending: list[Line] = []
        self._account: Account | None = None
        self._shipped: dict[Segment, int] = {}
        self._run = 0
        self._told = False
        self._leaving = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def record(self, entry: Entry) -> None:
        """Take note of one turn of the loop. Never blocks on the store."""
        if not is_worth_a_line(entry):
            return
        with self._lock:
            self._pending.append(to_line(entry))
            self._run = entry.state.ledger.run
        if not isinstance(entry.event, Progressed):
            self._news.set()

    def close(self, patience: float) -> None:
        """Ship what is left, for at most ``patience`` seconds."""
        self._leaving.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        """Every few seconds; what changes the job's fate goes at once, since the machine may be next."""
        while not self._leaving.is_set():
            self._news.wait(self._every)
            self._news.clear()
            self._ship()
            self._leaving.wait(SHORTEST_PAUSE)
        self._ship()

    def _ship(self) -> None:
        with self._lock:
            run, fresh = self._run, self._pending
            self._pending = []
        if not run:
            with self._lock:
                self._pending = fresh + self._pending
            return
        try:
            self._catch_up(run, fresh)
            fresh = []
            self._ship_segments(run)
            self._ship_status()
            self._told = False
        except (CloudrunError, OSError) as error:
            with self._lock:
                self._pending = fresh + self._pending
            if not self._told:
                self._told = True
                self._complain(f"logs and journal could not be stored, and are tried again: {error}")

    def _catch_up(self, run: int, fresh: list[Line]) -> None:
        """Fold new lines into the account, which begins with what earlier sessions wrote."""
        if self._account is None:
            self._shipped = {
                segment: size
                for kind in ("journal", "logs")
                for segment, (_, size) in stored_segments(self._store, self._keys, run, kind).items()
            }
            account = Account()
            for line in journal_lines(self._store, self._local, run, without=self._session):
                account = fold(account, line)
            self._account = account
        for line in fresh:
            self._account = fold(self._account, line)

    def _ship_segments(self, run: int) -> None:
        for kind in ("journal", "logs"):
            for segment, path in local_segments(self._local, run, kind).items():
                size = path.stat().st_size
                if size == self._shipped.get(segment, -1):
                    continue
                data = path.read_bytes()
                key = self._keys.run_prefix(run) + path.relative_to(self._local.run_state(run)).as_posix()
                self._store.write(key, data)
                self._shipped[segment] = len(data)

    def _ship_status(self) -> None:
        assert self._account is not None
        ended = self._account.state.get("phase") == "finished"
        now: dict[str, Any] = status(self._local.job, self._account, self._clock.now(), alive=not ended)
        data = (self._redact(json.dumps(now, indent=1)) + "\n").encode()
        with suppress(OSError):
            write_atomically(self._local.status, data)
        self._store.write(self._keys.status(), data)
