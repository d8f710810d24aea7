"""The protocol of the lease: how one of several machines gets it, shows that it lives, and lets go of it.

One small object in the store, taken and renewed by conditional writes. Whether its holder has died is judged by the
clock of who waits for it: nobody has renewed it for most of a period. The clocks of two machines are never compared.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from runner.clock import Clock
from runner.errors import ObjectChanged, ObjectExists, ObjectMissing
from runner.storage.api import ObjectStore
from runner.supervisor.lease_body import Body, Waiter, look_at, read_note

# Shares of a period. By its own clock a holder has stopped before, by the other's, anybody takes over.
RENEW, IN_DOUBT, LOST, EXPIRED = 0.25, 0.5, 0.75, 0.85
LOOK = 0.1
LONGEST_PAUSE = 2.0
"""Seconds between two looks at a lease, at most: how soon one that was released is taken."""

PERIODS_OF_A_WAITER = 2.5
TRIES_TO_RELEASE = 5


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
