"""Carries logs, journal and status to the store every few seconds, so that they outlive the machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from runner.checkpoint.layout import LocalLayout, Segment, StoreLayout
from runner.clock import Clock
from runner.core.ledger import Account, fold, status
from runner.core.record import Line
from runner.storage.api import ObjectStore
from runner.supervisor.history import journal_lines, local_segments, stored_segments
from runner.supervisor.lease import LeaseGone

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
        complain: Callable[[str], None],
    ) -> None:
        self._store = store
        self._local = local
        self._keys = StoreLayout(local.job)
        self._session = session
        self._every = every
        self._clock = clock
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

    def record(self, line: Line, run: int, *, urgent: bool) -> None:
        """Take note of a line of the journal. Never blocks on the store. ``urgent`` ones go at once.

        ``run`` is 0 while nothing may go: no run is known yet, or the store is another machine's.
        """
        with self._lock:
            self._pending.append(line)
            self._run = run
        if urgent:
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
            self._try()
            self._leaving.wait(SHORTEST_PAUSE)
        self._try()

    def _try(self) -> None:
        try:
            self._ship()
            self._told = False
        except LeaseGone:
            pass  # the store is another machine's: the loop hears of it, and leaves
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a complaint
            if not self._told:
                self._told = True
                self._complain(f"logs and journal could not be stored, and are tried again: {error}")

    def _ship(self) -> None:
        if not self._run:
            return
        account = self._catch_up(self._run)
        self._ship_segments(self._run)
        ended = account.state.get("phase") == "finished"
        told = status(self._local.job, account, self._clock.now(), alive=not ended)
        self._store.write(self._keys.status(), (json.dumps(told, indent=1) + "\n").encode())

    def _catch_up(self, run: int) -> Account:
        """The account, which begins with what earlier sessions wrote, with all new lines folded in."""
        if self._account is None:
            stored = [stored_segments(self._store, self._keys, run, kind) for kind in ("journal", "logs")]
            self._shipped = {segment: size for found in stored for segment, (_, size) in found.items()}
            account = Account()
            for line in journal_lines(self._store, self._local, run, without=self._session):
                account = fold(account, line)
            self._account = account
        with self._lock:
            fresh, self._pending = self._pending, []
        for line in fresh:
            self._account = fold(self._account, line)
        return self._account

    def _ship_segments(self, run: int) -> None:
        for kind in ("journal", "logs"):
            for segment, path in local_segments(self._local, run, kind).items():
                if path.stat().st_size == self._shipped.get(segment, -1):
                    continue
                data = path.read_bytes()
                key = self._keys.run_prefix(run) + path.relative_to(self._local.run_state(run)).as_posix()
                self._store.write(key, data)
                self._shipped[segment] = len(data)
