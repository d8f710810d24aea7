"""What a spoiling proxy does to which request: kinds of faults, and plans that choose among them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from urllib.parse import parse_qsl, urlsplit


@unique
class Kind(Enum):
    """One way in which a request goes wrong. ``Fault.at`` says where in the message, as a share of its bytes."""

    CUT_REQUEST = "the connection ends (FIN) while the request is sent; the server never sees it"
    RESET_REQUEST = "as CUT_REQUEST, with a RST"
    STALL_REQUEST = "nobody takes the rest of the request, for longer than the client waits"
    FLIP_REQUEST = "one bit of the request's body arrives wrong at the server"
    ERROR_500 = "answered with 500 InternalError; the server never sees it"
    SLOW_DOWN = "answered with 503 SlowDown"
    TOO_MANY = "answered with 429"
    SKEWED = "answered with 403 RequestTimeTooSkewed"
    SKEWED_400 = "as SKEWED, with 400"
    EXPIRED = "answered with 400 ExpiredToken"
    EXPIRED_403 = "as EXPIRED, with 403"
    GARBAGE = "answered with bytes that are no HTTP"
    PORTAL = "answered with 200 and the page of a captive portal"
    CUT_ANSWER = "carried out; the connection ends (FIN) while the answer is sent"
    RESET_ANSWER = "as CUT_ANSWER, with a RST"
    STALL_ANSWER = "carried out; the answer stops coming for longer than the client waits"
    FLIP_ANSWER = "carried out; one bit of the answer's body is wrong"
    TRUNCATED = "carried out; the answer's body is cut and its Content-Length agrees with that"
    LONGER = "carried out; Content-Length promises more than comes before the connection ends"
    SHORTER = "carried out; Content-Length promises less than comes, and the connection stays open"
    DELAYED = "carried out; the answer is right and late"
    LANDED = "carried out; the connection ends (RST) without an answer"
    LANDED_500 = "carried out; answered with 500 InternalError"


SAID_INSTEAD: Mapping[Kind, tuple[int, str]] = {
    Kind.ERROR_500: (500, "InternalError"),
    Kind.SLOW_DOWN: (503, "SlowDown"),
    Kind.TOO_MANY: (429, "TooManyRequests"),
    Kind.SKEWED: (403, "RequestTimeTooSkewed"),
    Kind.SKEWED_400: (400, "RequestTimeTooSkewed"),
    Kind.EXPIRED: (400, "ExpiredToken"),
    Kind.EXPIRED_403: (403, "ExpiredToken"),
    Kind.LANDED_500: (500, "InternalError"),
}
"""Status and code of answers that the proxy makes up."""

STALLS = frozenset({Kind.STALL_REQUEST, Kind.STALL_ANSWER})
SPOILT_REQUESTS = frozenset({Kind.CUT_REQUEST, Kind.RESET_REQUEST, Kind.STALL_REQUEST})
"""The server never sees these, nor the proxy their ends."""

RUBBISH = frozenset({Kind.GARBAGE, Kind.PORTAL})
BODIES = frozenset({Kind.FLIP_ANSWER, Kind.TRUNCATED, Kind.LONGER, Kind.SHORTER})
"""What can only be done to an answer that has a body."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    at: float = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan may look at. ``path`` is still quoted, ``query`` is not."""

    method: str
    path: str
    query: Mapping[str, str]
    range: str = ""

    @property
    def identity(self) -> str:
        """The same for every try of one request, in every run: without signatures and the names of uploads."""
        kept = sorted(item for item in self.query.items() if not item[0].startswith("X-Amz-") and item[0] != "uploadId")
        return f"{self.method} {self.path} {kept} {self.range}"


def request_of(method: str, target: str, range_: str) -> Request:
    parts = urlsplit(target)
    return Request(method, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)), range_)


Plan = Callable[[Request], Fault | None]
"""Asked once per request, from many threads; None lets the request pass."""


def nothing(_request: Request) -> Fault | None:
    """The plan of a proxy that only passes on."""
    return None


class RandomPlan:
    """Spoils a share of the requests, chosen by ``seed`` and by the request alone: what other threads ask meanwhile
    makes no difference. Never more than ``in_a_row`` tries of one request one after another, so that what can succeed
    does. ``allowed`` takes kinds away from requests for which they prove nothing.
    """

    def __init__(
        self,
        seed: int,
        weights: Mapping[Kind, float],
        *,
        probability: float,
        in_a_row: int = 2,
        allowed: Callable[[Request, Kind], bool] = lambda _request, _kind: True,
    ) -> None:
        self._seed = seed
        self._weights = weights
        self._probability = probability
        self._in_a_row = in_a_row
        self._allowed = allowed
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._row: Counter[str] = Counter()

    def __call__(self, request: Request) -> Fault | None:
        identity = request.identity
        with self._lock:
            nth = self._asked[identity]
            self._asked[identity] += 1
            fault = self._choose(request, random.Random(f"{self._seed} {identity} {nth}"))
            if fault is None or self._row[identity] >= self._in_a_row:
                self._row[identity] = 0
                return None
            self._row[identity] += 1
        return fault

    def _choose(self, request: Request, dice: random.Random) -> Fault | None:
        kinds = {kind: weight for kind, weight in self._weights.items() if self._allowed(request, kind)}
        if not kinds or dice.random() >= self._probability:
            return None
        return Fault(dice.choices(list(kinds), list(kinds.values()))[0], dice.random())


class EveryNth:
    """Spoils each ``n``-th request, the first of them the ``n``-th, with the same fault."""

    def __init__(self, n: int, fault: Fault, concerns: Callable[[Request], bool] = lambda _request: True) -> None:
        self._n = n
        self._fault = fault
        self._concerns = concerns
        self._lock = threading.Lock()
        self._asked = 0

    def __call__(self, request: Request) -> Fault | None:
        if not self._concerns(request):
            return None
        with self._lock:
            self._asked += 1
            return self._fault if self._asked % self._n == 0 else None


class Once:
    """Spoils the first requests that it concerns with the given faults, one each, and none after."""

    def __init__(self, *faults: Fault, concerns: Callable[[Request], bool] = lambda _request: True) -> None:
        self._faults = list(faults)
        self._concerns = concerns
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Fault | None:
        with self._lock:
            return self._faults.pop(0) if self._faults and self._concerns(request) else None
