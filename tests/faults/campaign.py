"""Many operations of a store through a spoiling proxy, and what must hold whatever happens to their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from runner.storage.api import ObjectStore
from runner.storage.opening import open_store
from runner.storage.retrying import Retry
from tests.faults.plans import BODIES, STALLS, Kind, RandomPlan, Request
from tests.faults.proxy import Proxy, spoiling
from tests.servers import Server

PATIENCE = 1
"""Seconds without a byte after which the client gives up here; 60 in earnest. Large bodies need more: the proxy, and
the server behind it, take them whole before they answer.
"""

DELAY = 0.1
LONGEST_CALL = 45.0
"""Seconds: some stalls, tries again, and a slow machine. Whatever takes longer hangs."""

IN_A_ROW = 2

WEIGHTS: Mapping[Kind, float] = {kind: 0.25 if kind in STALLS else 1.0 for kind in Kind}
"""Few stalls, since each costs the client's whole patience."""


def is_object(request: Request) -> bool:
    """Whether the answer's body is an object's: those of listings and the like have no digest, so that nobody can know
    of a flipped bit.
    """
    return request.method == "GET" and not {"list-type", "uploads", "uploadId", "prefix"} & set(request.query)


def is_listing(request: Request) -> bool:
    return request.method == "GET" and not is_object(request)


def knowable(request: Request, kind: Kind) -> bool:
    """Whether a client can know of the fault, and get over it, where each object's ETag is its MD5."""
    if request.method in ("HEAD", "PUT") and kind in BODIES:
        return False  # no body comes back
    if kind is Kind.FLIP_REQUEST:
        return request.method == "PUT"  # else there is no body, or one that has no digest
    if kind is Kind.PORTAL:
        return not is_listing(request)  # a page where a listing was asked for is a wrong endpoint, and told at once
    return kind is not Kind.FLIP_ANSWER or is_object(request)


def knowable_of_conditions(request: Request, kind: Kind) -> bool:
    """The same for conditional writes. Where the server takes a body that was mangled on its way, the key is taken:
    by nobody.
    """
    return knowable(request, kind) and kind is not Kind.FLIP_REQUEST


def patient(give_up_after: float = 60.0) -> Retry:
    """Tries again as in earnest, without the long waits."""
    return Retry(give_up_after, sleep=lambda seconds: time.sleep(min(seconds, 0.02)))


@contextmanager
def spoilt(
    server: Server,
    bucket: str,
    seed: int,
    *,
    probability: float = 0.5,
    retry: Retry | None = None,
    patience: int = PATIENCE,
    allowed: Callable[[Request, Kind], bool] = knowable,
) -> Iterator[tuple[ObjectStore, Proxy]]:
    """A store in ``bucket`` behind a proxy that spoils a share of its requests, and the proxy."""
    plan = RandomPlan(seed, WEIGHTS, probability=probability, in_a_row=IN_A_ROW, allowed=allowed)
    with spoiling(server.endpoint, plan, delay=DELAY) as proxy:
        access = replace(server.access(), endpoint=proxy.endpoint, stall=patience)
        yield open_store(f"s3://{bucket}/data", access, retry or patient()), proxy


def run_all(
    operation: Callable[[int], None], count: int, seed: int, *, at_once: int = 4, longest: float = LONGEST_CALL
) -> None:
    """``operation`` with 0, 1, ... by several threads. Each must end within ``longest`` seconds; the first failure is
    raised, and says with which seed it comes again.
    """
    failed = threading.Event()

    def one(number: int) -> None:
        if failed.is_set():
            return
        began = time.monotonic()
        try:
            operation(number)
            took = time.monotonic() - began
            assert took < longest, f"took {took:.0f} s"
        except BaseException as error:
            failed.set()
            error.add_note(f"operation {number} of seed {seed}")
            raise

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(one, number) for number in range(count)]:
            done.result(longest * count)
