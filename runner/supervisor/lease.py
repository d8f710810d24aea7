"""The lease: which one of several supervisors, on as many machines, runs the job and writes into its store.

One small object, taken and renewed by conditional writes. Whether its holder has died is judged by the clock of who
waits for it: nobody has renewed it for most of a period. The clocks of two machines are never compared.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from runner.clock import Clock
from runner.core.events import Event, LeaseHeld, LeaseLost, LeaseTaken, Noticed, StandbyChanged
from runner.errors import ObjectChanged, ObjectExists, ObjectMissing, StoreError, StoreUnreachable, UsageError
from runner.storage.api import ObjectStore
from runner.storage.retrying import Retry
from runner.supervisor.lease_body import Body, Waiter, look_at, read_note, sign_note

# Shares of a period. By its own clock a holder has stopped before, by the other's, anybody takes over.
RENEW, IN_DOUBT, LOST, EXPIRED = 0.25, 0.5, 0.75, 0.85
LOOK = 0.1
LONGEST_PAUSE = 2.0
"""Seconds between two looks at a lease, at most: how soon one that was released is taken."""

PERIODS_OF_A_WAITER = 2.5
TRIES_TO_RELEASE = 5


class LeaseInDoubt(StoreUnreachable):
    """The lease was not renewed in time to be sure of it; nothing may be written until it is."""


class LeaseGone(StoreError):
    """The job is another machine's: nothing may be written."""


class Stopwatch:
    """Seconds since its making, also those in which the machine slept."""

    def __init__(self) -> None:
        self._boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._wall = time.time()

    def seconds(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self._boot

    def most(self) -> float:
        """By the clock that has gone further: a virtual machine that was frozen may see it by the wall clock only."""
        return max(self.seconds(), time.time() - self._wall)


@dataclass(frozen=True, slots=True)
class Held:
    """Our lease as we last wrote it. ``since`` runs from before that write."""

    body: Body
    version: str
    since: Stopwatch


@dataclass(frozen=True, slots=True)
class LeasePlace:
    """Where the lease of a job is, and who asks for it. ``period`` is that of the leases that we write."""

    store: ObjectStore
    key: str
    me: Waiter
    period: float

    def look(self) -> tuple[Body, str] | None:
        return look_at(self.store, self.key)

    def write(self, body: Body, replacing: str | None) -> Held | None:
        """Create the lease, or replace that version of it; None when somebody else was quicker."""
        since = Stopwatch()
        only_new = replacing is None
        try:
            info = self.store.write(self.key, body.to_bytes(), only_new=only_new, replacing=replacing)
        except (ObjectExists, ObjectChanged, ObjectMissing):
            return None
        return Held(body, info.version, since)

    @property
    def short_pause(self) -> float:
        return min(LONGEST_PAUSE, LOOK * self.period)


class Candidate:
    """Waits for the lease: looks at it, signs the list of those who wait, takes it when it is free."""

    def __init__(self, place: LeasePlace, note: Path, *, may_begin: bool, clock: Clock) -> None:
        self._place = place
        self._note = note
        self._may_begin = may_begin
        self._clock = clock
        self._sign_of_life: tuple[str, int, int] | None = None
        self._seen_at = 0.0
        self._beaten_at = -math.inf
        self._beat = 0
        self.body: Body | None = None

    def ask(self) -> Held | None:
        """One look, and the lease if it is free. What was taken although no answer came is taken again."""
        held, tried = self._look()
        return self._look()[0] if tried and held is None else held

    def _look(self) -> tuple[Held | None, bool]:
        """The lease if we got it, and whether we tried. ``body`` is then what another one was quicker than."""
        looked = self._place.look()
        if looked is None:
            self.body = None
            return (self._take(0, (), None), True) if self._may_begin else (None, False)
        self.body, version = looked
        if self._is_free(self.body):
            return self._take(self.body.epoch, self.body.standby, version), True
        self._sign(self.body, version)
        return None, False

    def until_next_look(self) -> float:
        """Seconds. The moment in which a silent holder counts as dead is not slept through."""
        if self.body is None:
            return self._place.short_pause
        expires = self._seen_at + EXPIRED * self.body.period - time.monotonic()
        return min(LONGEST_PAUSE, LOOK * self.body.period, max(expires, 0.0))

    def _is_free(self, body: Body) -> bool:
        if body.sign_of_life != self._sign_of_life:
            self._sign_of_life, self._seen_at = body.sign_of_life, time.monotonic()
        silent = time.monotonic() - self._seen_at >= EXPIRED * body.period
        return silent or body.released or body.holder == self._place.me.id or self._is_our_dead_one(body)

    def _is_our_dead_one(self, body: Body) -> bool:
        """Our predecessor on this machine: whoever holds the machine's own lock for the job knows that it is dead."""
        note = read_note(self._note)
        return (note.holder, note.host) == (body.holder, body.host) and body.host == self._place.me.host

    def _take(self, epoch: int, standby: tuple[Waiter, ...], version: str | None) -> Held | None:
        me, others = self._place.me, tuple(one for one in standby if one.id != self._place.me.id)
        body = Body(me.id, me.host, epoch + 1, self._place.period, self._clock.now(), standby=others)
        return self._place.write(body, version)

    def _sign(self, body: Body, version: str) -> None:
        """Stand on the list: the holder wants to know whether somebody waits, and strikes out who has gone silent."""
        me = self._place.me
        listed = any(one.id == me.id for one in body.standby)
        if listed and time.monotonic() - self._beaten_at < body.period:
            return
        self._beat += 1
        others = tuple(one for one in body.standby if one.id != me.id)
        signed = replace(body, standby=(*others, replace(me, beat=self._beat)))
        if self._place.write(signed, version) is not None:
            self._beaten_at = time.monotonic()


class Tenure:
    """Holds the lease: renews it, knows who waits for it, lets go of it."""

    def __init__(self, place: LeasePlace, held: Held) -> None:
        self._place = place
        self._waiters: dict[str, tuple[Waiter, float]] = {}
        self._signs = held.body.renewed
        self.held = held
        self.epoch = held.body.epoch
        self._meet(held.body.standby)

    @property
    def standby(self) -> tuple[str, ...]:
        return tuple(sorted(waiter.host for waiter in self._present()))

    def renew(self) -> str:
        """Write the next sign of life. Empty, or why the lease is ours no more."""
        body = self.held.body
        if renewed := self._place.write(self._next(released=False), self.held.version):
            self.held = renewed
            return ""
        looked = self._place.look()
        if looked is None:
            return "the job's lease was deleted"
        found, version = looked
        if found.holder != body.holder:
            return f"another machine has taken over: {found.host}"
        # Somebody has signed the list, or the answer to our last write was lost.
        self._meet(found.standby)
        return self._renew_at(version)

    def _renew_at(self, version: str) -> str:
        if renewed := self._place.write(self._next(released=False), version):
            self.held = renewed
        # Else somebody was quicker again. The next turn tells: this one has proved nothing.
        return ""

    def release(self) -> None:
        """Free it for the next one, in a few tries; should none succeed, it expires."""
        version = self.held.version
        for _ in range(TRIES_TO_RELEASE):
            if self._place.write(self._next(released=True), version):
                return
            looked = self._place.look()
            if looked is None or looked[0].holder != self._place.me.id:
                return
            version = looked[1]
            self._meet(looked[0].standby)

    def _next(self, *, released: bool) -> Body:
        # Each try gets a number of its own: one whose answer is lost may have been seen already.
        self._signs += 1
        standby = tuple(self._present())
        return replace(self.held.body, epoch=self.epoch, renewed=self._signs, released=released, standby=standby)

    def _meet(self, waiters: tuple[Waiter, ...]) -> None:
        now, known = time.monotonic(), self._waiters
        heard = {one.id: (one, now) for one in waiters if one.id not in known or known[one.id][0] != one}
        # Replaced, not changed: another thread may be reading it.
        self._waiters = {**known, **heard}

    def _present(self) -> list[Waiter]:
        oldest = time.monotonic() - PERIODS_OF_A_WAITER * self._place.period
        return [waiter for waiter, seen in self._waiters.values() if seen >= oldest]


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
