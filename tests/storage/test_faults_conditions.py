"""Conditional writes through a network that breaks: one winner, who knows it, also when the answer was lost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from runner.errors import ObjectChanged, ObjectExists
from tests.faults.campaign import LONGEST_CALL, WEIGHTS, knowable_of_conditions, patient, run_all, spoilt
from tests.faults.plans import STALLS, Fault, Kind, Once, Request, nothing
from tests.servers import Server

RIVALS = 3
LANDS: frozenset[Kind] = frozenset({
    Kind.LANDED, Kind.LANDED_500, Kind.CUT_ANSWER, Kind.RESET_ANSWER, Kind.STALL_ANSWER, Kind.LONGER, Kind.SHORTER,
    Kind.TRUNCATED, Kind.FLIP_ANSWER,
})  # fmt: skip
"""What happens after the server has done as it was asked."""


def race_all(server: Server, seed: int, races: int) -> None:
    """Rivals create the same key, each with bytes of its own."""
    bucket = f"faults-race-{seed}"
    server.make_bucket(bucket)
    spoiling = spoilt(server, bucket, seed, allowed=knowable_of_conditions)
    with spoiling as (store, proxy), ThreadPoolExecutor(4 * RIVALS) as rivals:
        assert store.exclusive

        def create(key: str, who: int) -> bool:
            try:
                info = store.write(key, f"{key} {who}".encode(), only_new=True)
            except ObjectExists:
                return False
            assert (info.key, info.version) == (key, store.look(key)[1])
            return True

        def race(number: int) -> None:
            key = f"lock-{number}"
            tries = [rivals.submit(create, key, who) for who in range(RIVALS)]
            winners = [who for who, won in enumerate(tries) if won.result(LONGEST_CALL)]
            assert len(winners) == 1, winners
            assert store.read(key) == f"{key} {winners[0]}".encode()

        run_all(race, races, seed)
        assert proxy.done.total() >= 200
        assert proxy.done.keys() >= WEIGHTS.keys() - STALLS - {Kind.FLIP_REQUEST}


def test_one_of_several_creates_a_key_despite_two_hundred_faults(seaweedfs: Server) -> None:
    race_all(seaweedfs, seed=1, races=40)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_one_of_several_creates_a_key_despite_random_faults(seaweedfs: Server) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    race_all(seaweedfs, seed, races=400)


def append_all(server: Server, seed: int, rounds: int) -> None:
    """Rivals add lines to one object, each replacing exactly what it read: a log that shows every lost or doubled
    write.
    """
    bucket = f"faults-log-{seed}"
    server.make_bucket(bucket)
    won, lost, lock = Counter[str](), set[str](), threading.Lock()
    with spoilt(server, bucket, seed, allowed=knowable_of_conditions) as (store, proxy):
        store.write("log", b"", only_new=True)

        def append(number: int) -> None:
            while True:
                line = f"{number}-{random.randrange(1 << 48):x}"
                log, version = store.look("log")
                try:
                    store.write("log", log + f"{line}\n".encode(), replacing=version)
                except ObjectChanged:
                    with lock:
                        lost.add(line)
                    continue
                with lock:
                    won[line] += 1
                return

        run_all(append, rounds, seed)
        proxy.plan = nothing
        lines = Counter(store.read("log").decode().split())
        landed = sum(proxy.done[kind] for kind in LANDS)
        spoilt_so_far = proxy.done.total()
    assert set(lines.values()) == {1}
    assert won.keys() <= lines.keys()
    # One that landed, was not told, and was replaced by a rival before it looked, counts as lost: nothing stands on it.
    assert lines.keys() <= won.keys() | lost
    assert len(lines.keys() - won.keys()) <= landed
    assert spoilt_so_far >= 200


def test_no_update_is_lost_or_doubled_despite_two_hundred_faults(seaweedfs: Server) -> None:
    append_all(seaweedfs, seed=1, rounds=100)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_update_is_lost_or_doubled_by_random_faults(seaweedfs: Server) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    append_all(seaweedfs, seed, rounds=1000)


def is_write(request: Request) -> bool:
    return request.method == "PUT" and "mine" in request.path


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind in LANDS])
@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
def test_a_lost_answer_is_recognised_as_ours(seaweedfs: Server, kind: Kind, *, replacing: bool) -> None:
    bucket = f"faults-ours-{kind.name.lower().replace('_', '-')}-{int(replacing)}"
    seaweedfs.make_bucket(bucket)
    with spoilt(seaweedfs, bucket, 1) as (store, proxy):
        proxy.plan = nothing
        assert store.exclusive
        version = store.write("mine", b"before").version if replacing else None
        proxy.plan = Once(Fault(kind, 0.0), Fault(kind, 0.0), concerns=is_write)
        info = store.write("mine", b"ours", only_new=not replacing, replacing=version)
        assert store.look("mine") == (b"ours", info.version)


def test_the_same_bytes_by_another_are_not_ours_at_the_first_try(seaweedfs: Server) -> None:
    seaweedfs.make_bucket("faults-theirs")
    with spoilt(seaweedfs, "faults-theirs", 1, retry=patient(5.0)) as (store, proxy):
        proxy.plan = nothing
        store.write("mine", b"same")
        with pytest.raises(ObjectExists):
            store.write("mine", b"same", only_new=True)


def test_anothers_bytes_are_not_ours_after_a_lost_request(seaweedfs: Server) -> None:
    seaweedfs.make_bucket("faults-anothers")
    with spoilt(seaweedfs, "faults-anothers", 1) as (store, proxy):
        proxy.plan = nothing
        assert store.exclusive
        version = store.write("mine", b"theirs").version
        proxy.plan = Once(Fault(Kind.RESET_REQUEST), concerns=is_write)
        with pytest.raises(ObjectExists):
            store.write("mine", b"ours", only_new=True)
        assert proxy.done == {Kind.RESET_REQUEST: 1}
        assert store.look("mine") == (b"theirs", version)
