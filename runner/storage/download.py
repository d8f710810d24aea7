"""Down: one object into one file, written in place; large ones by several ranges at once.

Each range keeps what has come when its request dies, and asks for the rest. All requests name the version that the
first answer told, so that bytes of two versions never meet in one file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from runner.errors import BeyondEnd, CloudrunError, CorruptData, StoreUnreachable
from runner.storage.api import OnBytes
from runner.storage.bucket import Answer, Proof
from runner.storage.joining import joined
from runner.storage.local import translating
from runner.storage.requests import Requests, raise_first
from runner.storage.retrying import worth_retrying
from runner.storage.transfer_note import TransferNote

RANGE = 32 << 20
"""Bytes of one request. Smaller ones cost more requests, larger ones lose more when they are cut."""

RANGES_AT_ONCE = 4

WORTH_GOING_ON = 256 << 10
"""Bytes that a request must have brought before it died, for the next one to be no second try but a continuation."""

PROOF_TRIES = 3
"""How often an object is fetched whose bytes do not match its digest: a network does not flip a bit each time."""

Span = tuple[int, int]
"""First byte, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``first`` to ``after`` that are in the file. ``crc32c`` is None where an older note does not tell it."""

    first: int
    after: int
    crc32c: int | None

    @property
    def span(self) -> Span:
        return self.first, self.after


class MismatchError(Exception):
    """The bytes that came are not those that the store has a digest of."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What the first answer told of the object, and what of it is in the file."""

    size: int
    version: str
    proof: Proof | None
    done: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Download:
    """One object on its way into ``target``; ``key`` is the bucket's. ``note`` as in ``ObjectStore.download``."""

    requests: Requests
    key: str
    target: Path
    on_bytes: OnBytes
    note: Path | None

    def run(self, version: str | None) -> int | None:
        """Bring and prove all of it; returns its CRC32C, computed as it came. Raises ObjectChanged, CorruptData,
        DiskFull, and the bucket's errors.
        """
        for _ in range(PROOF_TRIES - 1):
            try:
                return self._bring(version)
            except MismatchError as error:
                self.requests.retry.went_on("download", StoreUnreachable(str(error)))
        try:
            return self._bring(version)
        except MismatchError as error:
            raise CorruptData(f"{error}, each of {PROOF_TRIES} times", "is the object damaged in the store?") from None

    def _bring(self, version: str | None) -> int | None:
        resumed = self._resumed(version) if version is not None else None
        if resumed is None and self.note is not None:
            # First of all: a note must never speak of a file that it does not belong to.
            self.note.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resumed else os.O_TRUNC)
        with translating(str(self.target)):
            fd = os.open(self.target, flags, 0o666)
        try:
            with translating(str(self.target), room=(self.target.parent, resumed.size if resumed else 0)):
                return self._fill(fd, resumed or self._begin(fd, version))
        finally:
            os.close(fd)

    def _begin(self, fd: int, version: str | None) -> Begun:
        """Bring the first range: of a small object that is the whole."""
        begun = self.requests.retry("download", lambda: self._first(fd, version), worth_retrying)
        # An earlier try may have written more of a longer version.
        os.ftruncate(fd, begun.size)
        if begun.size > RANGE and (note := self._note(begun.version)) is not None:
            proof = begun.proof and [begun.proof.kind, begun.proof.digest]
            note.begin({"size": begun.size, "proof": proof})
            note.add(_noted(begun.done[0]))
        return begun

    def _first(self, fd: int, version: str | None) -> Begun:
        span = _Span(self, fd, version, 0, RANGE, threading.Event())
        with self.requests.throttle.turn(), self._beginning(version) as answer:
            span.end = min(answer.size, RANGE)
            begun = Begun(answer.size, answer.version, answer.proof)
            span.take_what_comes(answer.chunks)
        return replace(begun, done=(span.piece,))

    @contextmanager
    def _beginning(self, version: str | None) -> Iterator[Answer]:
        """As a range: then the store tells the object's length in words, and it is not read from where the answer ends,
        which may be too early.
        """
        bucket, found = self.requests.bucket, False
        try:
            with bucket.get(self.key, version=version, length=RANGE) as answer:
                found = True
                yield answer
        except BeyondEnd:
            if found:
                raise
            with bucket.get(self.key, version=version) as answer:  # an empty object has no ranges
                yield answer

    def _fill(self, fd: int, begun: Begun) -> int | None:
        """Bring the spans that are missing, several at once, and prove the whole; its checksum."""
        missing = iter(list(missing_spans(begun.size, [piece.span for piece in begun.done])))
        pieces = list(begun.done)
        note, failed = self._note(begun.version), threading.Event()

        def work() -> None:
            # Its own descriptor: whatever ends the others, a number that is used anew is never written to.
            own = os.dup(fd)
            try:
                while not failed.is_set() and (span := next(missing, None)) is not None:
                    piece = _Span(self, own, begun.version, *span, failed).bring()
                    pieces.append(piece)
                    if note is not None:
                        note.add(_noted(piece))
            except BaseException:
                failed.set()
                raise
            finally:
                os.close(own)

        if begun.size > RANGE:
            all_at_once(work, RANGES_AT_ONCE, failed)
        else:
            work()
        self._prove(fd, begun)
        if note is not None:
            note.remove()
        return _checksum(pieces)

    def _prove(self, fd: int, begun: Begun) -> None:
        if begun.proof is None or begun.proof.fits(pieces_of(fd, begun.size)):
            return
        if self.requests.send("read", lambda: self.requests.bucket.proof(self.key, begun.version)) is None:
            return
        if (note := self._note(begun.version)) is not None:
            note.remove()
        raise MismatchError(f"{self.requests.what(self.key)}: its bytes do not match its {begun.proof.kind}")

    def _note(self, version: str) -> TransferNote | None:
        if self.note is None:
            return None
        about = {"object": self.requests.what(self.key), "version": version, "target": str(self.target)}
        return TransferNote(self.note, about)

    def _resumed(self, version: str) -> Begun | None:
        """How far an earlier process has come with the same version; None where it has not begun."""
        note = self._note(version)
        told = note.read() if note is not None else None
        if told is None or not self.target.exists() or self.target.stat().st_size != told[0]["size"]:
            return None
        head, pieces = told
        proof = Proof(*head["proof"]) if head["proof"] else None
        return Begun(
            head["size"],
            version,
            proof,
            tuple(Piece(piece["from"], piece["to"], piece.get("crc32c")) for piece in pieces),
        )


class _Span:
    """Bytes ``at`` to ``end`` of an object; goes on after the last one that came, whatever happens to its requests.

    Once ``dropped`` is set nobody wants them any more.
    """

    def __init__(
        self, download: Download, fd: int, version: str | None, at: int, end: int, dropped: threading.Event
    ) -> None:
        self._download = download
        self._fd = fd
        self._version = version
        self._dropped = dropped
        self._first = at
        self._checksum = 0
        self.at = at
        self.end = end

    @property
    def piece(self) -> Piece:
        """What has come so far."""
        return Piece(self._first, self.at, self._checksum)

    def bring(self) -> Piece:
        retry = self._download.requests.retry
        while self.at < self.end:
            retry("download", self._ask, worth_retrying)
        return self.piece

    def _ask(self) -> None:
        if self._dropped.is_set():
            raise CancelledError
        requests, key = self._download.requests, self._download.key
        with (
            requests.throttle.turn(),
            requests.bucket.get(key, version=self._version, start=self.at, length=self.end - self.at) as answer,
        ):
            self.take_what_comes(answer.chunks)

    def take_what_comes(self, chunks: Iterable[memoryview]) -> None:
        """Until the end, or until the request dies; that is no failure once it has brought much."""
        began = self.at
        try:
            for chunk in chunks:
                self._take(chunk[: self.end - self.at])
                if self.at == self.end:
                    return
        except CloudrunError as error:
            if not worth_retrying(error) or self.at - began < WORTH_GOING_ON:
                raise
            self._download.requests.retry.went_on("download", error)

    def _take(self, chunk: memoryview) -> None:
        write_at(self._fd, chunk, self.at)
        self._checksum = crc32c(chunk, self._checksum)
        self.at += len(chunk)
        self._download.on_bytes(len(chunk))


def all_at_once(work: Callable[[], None], times: int, failed: threading.Event) -> None:
    """``work`` in so many threads. The first failure is raised at once: it sets ``failed``, which ends the others."""
    pool = ThreadPoolExecutor(times, thread_name_prefix="range")
    workers = [pool.submit(work) for _ in range(times)]
    try:
        raise_first(workers)
    finally:
        failed.set()
        pool.shutdown(wait=True)


def _noted(piece: Piece) -> dict[str, int | None]:
    return {"from": piece.first, "to": piece.after, "crc32c": piece.crc32c}


def _checksum(pieces: Iterable[Piece]) -> int | None:
    """Of the whole that they are; None where one of them does not know its own, or two overlap."""
    ordered, at = sorted(pieces, key=lambda piece: piece.first), 0
    for piece in ordered:
        if piece.crc32c is None or piece.first != at:
            return None
        at = piece.after
    return joined((piece.crc32c or 0, piece.after - piece.first) for piece in ordered)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write every byte; the system may take them in pieces."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def missing_spans(size: int, done: Iterable[Span]) -> Iterator[Span]:
    """What of ``size`` bytes is in none of ``done``, in pieces of at most a range."""
    at = 0
    for first, after in [*sorted(done), (size, size)]:
        while at < first:
            end = min(at + RANGE, first)
            yield at, end
            at = end
        at = max(at, after)


def pieces_of(fd: int, size: int) -> Iterator[memoryview]:
    """The first ``size`` bytes of a file, a piece at a time; each is good until the next one is asked for."""
    buffer, at = memoryview(bytearray(min(size, 1 << 20))), 0
    while at < size and (count := os.preadv(fd, [buffer], at)):
        yield buffer[:count]
        at += count
