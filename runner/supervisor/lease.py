"""The lease: which one of several supervisors, on as many machines, runs the job and writes into its store.

Here is who keeps it, in threads of his own; by what rules stands in :mod:`runner.supervisor.lease_protocol`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from runner.clock import Clock
from runner.core.events import Event, LeaseHeld, LeaseLost, LeaseTaken, Noticed, StandbyChanged
from runner.errors import StoreError, StoreUnreachable, UsageError
from runner.storage.retrying import Retry
from runner.supervisor.lease_body import sign_note
from runner.supervisor.lease_protocol import (
    IN_DOUBT,
    LOOK,
    LOST,
    RENEW,
    Candidate,
    Held,
    LeasePlace,
    Stopwatch,
    Tenure,
)

__all__ = ["LeaseGone", "LeaseInDoubt", "LeaseKeeper", "LeasePlace"]


class LeaseInDoubt(StoreUnreachable):
    """The lease was not renewed in time to be sure of it; nothing may be written until it is."""


class LeaseGone(StoreError):
    """The job is another machine's: nothing may be written."""


class LeaseKeeper:
    """One supervisor's part in the lease: posts what becomes of it, and says at any moment whether writing is allowed.

    The place's store must not be patient: a call may take a fraction of a period. ``first`` is the patience for the
    first question of all. Without ``may_begin`` a job that nobody has ever begun is left to another machine.
    """

    def __init__(
        self,
        place: LeasePlace,
        note: Path,
        *,
        post: Callable[[Event], None],
        clock: Clock,
        first: Retry,
        may_begin: bool = True,
    ) -> None:
        self._place = place
        self._note = note
        self._post = post
        self._clock = clock
        self._first = first
        self._may_begin = may_begin
        self._candidate = self._new_candidate()
        self._lock = threading.Lock()
        self._tenure: Tenure | None = None
        self._free_for_all = False
        self._why_not = "this machine does not hold the job's lease"
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._asking: Stopwatch | None = None
        self._failing = ""
        self._told_holder: tuple[str, str] | None = None
        self._told_standby: tuple[str, ...] = ()

    # -- what others call ----------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Post LeaseTaken; or LeaseHeld, and LeaseTaken as soon as the lease is ours. Raises CloudrunError."""
        if not self._first("lease", lambda: self._place.store.exclusive):
            self._do_without()
            return
        self._over, self._candidate = threading.Event(), self._new_candidate()
        self._told_holder, self._told_standby = None, ()
        self._tell(self._first("lease", self._candidate.ask))
        self._thread = threading.Thread(target=self._work, args=(self._over,), name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LeaseGone or LeaseInDoubt, unless at this moment nobody else can have the lease."""
        self.check_not_lost()
        with self._lock:
            late = self._tenure.held.since.most() if self._tenure else 0.0
        if late > IN_DOUBT * self._place.period:
            raise LeaseInDoubt(f"the lease was not renewed for {late:.0f} s, so another machine may have it")

    def check_not_lost(self) -> None:
        """Raises LeaseGone when the job is known to be another machine's."""
        with self._lock:
            if self._tenure is None and not self._free_for_all:
                raise LeaseGone(self._why_not)

    def epoch_above(self, stored: int) -> int:
        """The epoch of our checkpoints: above all that are stored; without a lease, level with them.

        A lease that somebody has deleted counts from 1 again, until it hears of them here.
        """
        with self._lock:
            if self._tenure is None:
                return stored
            self._tenure.epoch = max(self._tenure.epoch, stored + 1)
            return self._tenure.epoch

    def release(self) -> None:
        """Let another machine take over. Returns at once."""
        self._over.set()

    def close(self, patience: float) -> None:
        """Release the lease, if it is ours, and wait for that so long."""
        self.release()
        if self._thread is not None:
            self._thread.join(patience)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self, over: threading.Event) -> None:
        threading.Thread(target=self._watch, args=(over,), name="lease watch", daemon=True).start()
        while not over.wait(self._pause()):
            self._turn()
        tenure = self._end("this machine has released the job's lease")
        if tenure is not None:
            self._turn_once(tenure.release)

    def _pause(self) -> float:
        if self._failing:
            return self._place.short_pause
        return RENEW * self._place.period if self._tenure else self._candidate.until_next_look()

    def _turn(self) -> None:
        tenure = self._tenure
        if tenure is None:
            self._turn_once(self._wait_for_it)
        else:
            self._turn_once(lambda: self._renew(tenure))

    def _turn_once(self, work: Callable[[], None]) -> None:
        self._asking = Stopwatch()
        try:
            work()
            self._failing = ""
        except Exception as error:  # noqa: BLE001 - a thread's edge: it is tried again, and the watch tells of it
            self._failing = str(error) or type(error).__name__
        finally:
            self._asking = None

    def _wait_for_it(self) -> None:
        self._tell(self._candidate.ask())

    def _tell(self, held: Held | None) -> None:
        news = self._begin(held) if held else self._news()
        if news is not None:
            self._post(news)

    def _begin(self, held: Held) -> Event:
        tenure = Tenure(self._place, held)
        with self._lock:
            self._tenure = tenure
        try:
            sign_note(self._note, held.body.holder, held.body.host)
        except OSError as error:
            self._post(Noticed(f"cannot note that this machine has the lease; a restart will wait for it: {error}"))
        return LeaseTaken(held.body.holder, held.body.host, held.body.epoch)

    def _news(self) -> Event | None:
        """Whom we wait for, whenever that is another one."""
        body = self._candidate.body
        told = (body.holder, body.host) if body is not None else ("", "")
        if told == self._told_holder:
            return None
        self._told_holder = told
        if body is None:
            return LeaseHeld("", "", 0, self._clock.now())
        return LeaseHeld(body.holder, body.host, body.epoch, body.at, tuple(one.host for one in body.standby))

    def _renew(self, tenure: Tenure) -> None:
        if reason := tenure.renew():
            self._lose(reason)
        elif (standby := tenure.standby) != self._told_standby:
            self._told_standby = standby
            self._post(StandbyChanged(standby))

    def _lose(self, reason: str) -> None:
        if self._end(reason) is not None:
            self._post(LeaseLost(reason))
            self._over.set()

    def _end(self, reason: str) -> Tenure | None:
        """From now on nothing is written. The tenure that was, for the one who ends it."""
        with self._lock:
            tenure, self._tenure = self._tenure, None
            if tenure is not None:
                self._why_not = reason
        return tenure

    # -- the watch -----------------------------------------------------------------------------------------------------

    def _watch(self, over: threading.Event) -> None:
        """A thread of its own, since a request to a dead network disk may never return."""
        in_trouble = False
        while not over.wait(self._place.short_pause / 2):
            tenure = self._tenure
            late = tenure.held.since.seconds() / self._place.period if tenure else 0.0
            if tenure is not None and late > LOST and tenure.standby and self._is_failing():
                who = ", ".join(tenure.standby)
                self._lose(f"the lease could not be renewed; {who} will take over: {self._failing or 'no answer'}")
            trouble = late > IN_DOUBT if tenure else bool(self._failing)
            if trouble != in_trouble:
                in_trouble = trouble
                self._post(Noticed(self._words(trouble=trouble)))

    def _is_failing(self) -> bool:
        """A machine that has just woken up has not asked yet."""
        asking = self._asking
        return bool(self._failing) or (asking is not None and asking.seconds() > LOOK * self._place.period)

    def _words(self, *, trouble: bool) -> str:
        if not trouble:
            return "the lease answers again"
        why = self._failing or "no answer"
        if self._tenure is None:
            return f"the lease cannot be read, and is asked for again and again: {why}"
        return f"the lease could not be renewed in time; training goes on, but nothing is stored until it is: {why}"

    # -- other cases ---------------------------------------------------------------------------------------------------

    def _new_candidate(self) -> Candidate:
        return Candidate(self._place, self._note, may_begin=self._may_begin, clock=self._clock)

    def _do_without(self) -> None:
        url = self._place.store.url
        if not self._may_begin:
            raise UsageError(
                f"{url} has no conditional writes, so no machine can stand by for another there",
                "leave --standby out, and let only one machine at a time run the job",
            )
        with self._lock:
            self._free_for_all = True
        self._post(
            Noticed(
                f"{url} has no conditional writes, so nothing keeps two machines from running this job at the same "
                "time: no checkpoint would be lost by it, but both would train, and the higher step would win"
            )
        )
        self._post(LeaseTaken(self._place.me.id, self._place.me.host, 0))
