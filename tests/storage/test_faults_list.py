"""Listings through a network that breaks: complete, or there is an error."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from runner.storage.opening import open_store
from runner.storage.retrying import Retry
from tests.faults.campaign import WEIGHTS, run_all, spoilt
from tests.faults.plans import STALLS, Kind
from tests.servers import Server

BUCKET = "faults-list"
NOT_HERE = frozenset({Kind.FLIP_ANSWER, Kind.FLIP_REQUEST, Kind.PORTAL})
"""Listings have no digest, requests for them no body, and a page instead of one ends it: no store talks like that."""

KEYS = frozenset(f"{number % 7}/{number:05d}" for number in range(2500))


@pytest.fixture(scope="module")
def listed(seaweedfs: Server) -> Server:
    seaweedfs.make_bucket(BUCKET)
    store = open_store(f"s3://{BUCKET}/data", seaweedfs.access(), Retry(30.0))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.write(key, key.encode()), sorted(KEYS)))
    return seaweedfs


def list_all(server: Server, seed: int, times: int) -> None:
    with spoilt(server, BUCKET, seed) as (store, proxy):

        def look(number: int) -> None:
            # A few prefixes beside the whole, so that not all ask the same.
            prefix = "" if number % 2 else f"{number // 2 % 7}/"
            wanted = {key for key in KEYS if key.startswith(prefix)}
            assert Counter(info.key for info in store.list(prefix)) == Counter(wanted)

        run_all(look, times, seed)
        assert proxy.done.total() >= 200
        assert proxy.done.keys() >= WEIGHTS.keys() - STALLS - NOT_HERE


def test_listings_survive_two_hundred_faults(listed: Server) -> None:
    list_all(listed, seed=1, times=170)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_listings_survive_random_faults(listed: Server) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    list_all(listed, seed, times=1500)


def test_folders_survive_faults(listed: Server) -> None:
    with spoilt(listed, BUCKET, 2) as (store, proxy):

        def look(number: int) -> None:
            assert sorted(store.folders()) == [str(digit) for digit in range(7)]

        run_all(look, 40, 2)
        assert proxy.done.total() >= 20
