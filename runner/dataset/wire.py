"""What goes through the pipes between this process and its workers: pickled values, one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from runner.dataset.task import Failure, Outcome
from runner.errors import CloudrunError, StoreError
from runner.storage.api import ObjectStore
from runner.storage.retrying import Retry

Opens = Callable[[Retry], ObjectStore]
"""How to open a store; can be sent to another process."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker has to know: how to open the store, for how many seconds to try again, where files go."""

    opening: Opens
    patience: float
    files: Path
    parts: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Retrying:
    """The store failed; the next try comes in ``wait`` seconds."""

    operation: str
    error: CloudrunError
    wait: float


Message = list[Outcome] | Retrying
"""What a worker sends."""


def encode(message: Message) -> bytes:
    """The pickled message. An error that would not arrive is told in words."""
    if isinstance(message, list):
        return pickle.dumps([_arriving(one) if isinstance(one, Failure) else one for one in message])
    if _arrives(message):
        return pickle.dumps(message)
    return pickle.dumps(replace(message, error=StoreError(_in_words(message.error))))


def _arriving(failure: Failure) -> Failure:
    return failure if _arrives(failure) else Failure(failure.key, RuntimeError(_in_words(failure.error)))


def _arrives(value: Failure | Retrying) -> bool:
    """Whether it can be packed and unpacked: an exception may be unable to do either."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - pickle raises whatever an object's own methods do
        return False
    return True


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
