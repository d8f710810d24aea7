"""The lease through a network that breaks: one holder at a time, each of a later epoch, whatever answers get lost."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from runner.clock import SystemClock
from runner.supervisor.lease_body import Waiter
from runner.supervisor.lease_protocol import Candidate, LeasePlace, Tenure
from tests.faults.campaign import LONGEST_CALL, WEIGHTS, knowable_of_conditions, run_all, spoilt
from tests.faults.plans import STALLS, Kind
from tests.servers import Server

RIVALS = 3
RENEWALS = 3
LONGEST_WAIT = 4 * LONGEST_CALL
"""Seconds: whoever is unlucky waits for several others. Whatever takes longer was never let go of."""

NEVER = 3600.0
"""Seconds: a period within which nobody is taken for dead, so that each release is the work of its holder."""


class Throne:
    """Who holds the lease, as the holders themselves believe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[str] = []
        self.epochs: list[int] = []

    def ascend(self, who: str, epoch: int) -> None:
        with self._lock:
            assert not self._holders, f"{who} and {self._holders} hold it at the same time"
            self._holders.append(who)
            self.epochs.append(epoch)

    def leave(self, who: str) -> None:
        with self._lock:
            self._holders.remove(who)


def reign_all(server: Server, folder: Path, seed: int, reigns: int) -> None:
    """Machines take the lease, renew it and let go of it, some of them at the same time."""
    bucket, throne = f"faults-lease-{seed}", Throne()
    server.make_bucket(bucket)
    with spoilt(server, bucket, seed, allowed=knowable_of_conditions) as (store, proxy):
        assert store.exclusive

        def reign(number: int) -> None:
            me = Waiter(f"session {number}", f"machine {number}")
            place = LeasePlace(store, "job/lease.json", me, NEVER)
            candidate = Candidate(place, folder / f"{number}", may_begin=True, clock=SystemClock())
            while (held := candidate.ask()) is None:
                time.sleep(0.1)
            throne.ascend(me.id, held.body.epoch)
            tenure = Tenure(place, held)
            assert [tenure.renew() for _ in range(RENEWALS)] == [""] * RENEWALS
            throne.leave(me.id)
            tenure.release()

        run_all(reign, reigns, seed, at_once=RIVALS, longest=LONGEST_WAIT)
        assert len(throne.epochs) == reigns
        assert throne.epochs == sorted(set(throne.epochs))
        assert proxy.done.total() >= 200
        assert proxy.done.keys() >= WEIGHTS.keys() - STALLS - {Kind.FLIP_REQUEST}


def test_one_holds_the_lease_despite_two_hundred_faults(seaweedfs: Server, tmp_path: Path) -> None:
    reign_all(seaweedfs, tmp_path, seed=1, reigns=24)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_one_holds_the_lease_despite_random_faults(seaweedfs: Server, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    reign_all(seaweedfs, tmp_path, seed, reigns=200)
