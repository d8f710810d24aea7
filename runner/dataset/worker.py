"""A process that brings small files: one Python process is bound by its interpreter lock long before the network is.

``python -m runner.dataset.worker DESCRIPTOR``: pickled values come by standard input, a :class:`Start`, then groups of
tasks; outcomes and news of retries go out by the descriptor, which nothing else knows of. The end of the input ends the
process, and so does its parent's death. Credentials come by the pipe, never by the arguments or the environment.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

from runner.dataset.crew import ENDING, Crew
from runner.dataset.fetch import Fetcher
from runner.dataset.task import Failure
from runner.dataset.wire import Message, Retrying, Start, encode
from runner.errors import CloudrunError
from runner.storage.retrying import Retry

_PR_SET_PDEATHSIG = 1


class Worker:
    """The child's side of the pipes."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._sending = threading.Lock()
        self._quits = threading.Event()

    def run(self) -> None:
        with suppress(EOFError):
            start: Start = self._receive()
            try:
                fetcher = self._fetcher(start)
            except CloudrunError as error:
                self._send([Failure("the small files", error)])
            else:
                self._work(Crew(fetcher, start.threads, self._send))

    def _work(self, crew: Crew) -> None:
        try:
            while True:
                group = self._receive()
                crew.hand(group, together=len(group))
        finally:
            self._quits.set()
            crew.end()
            crew.join(time.monotonic() + ENDING)

    def _fetcher(self, start: Start) -> Fetcher:
        retry = Retry(start.patience, on_retry=self._tell, stop=self._quits)
        return Fetcher(start.opening(retry), start.files, start.parts, self._quits.is_set)

    def _tell(self, operation: str, error: CloudrunError, wait: float) -> None:
        self._send(Retrying(operation, error, wait))

    def _receive(self) -> Any:
        return pickle.load(self._incoming)  # noqa: S301 - our own parent's

    def _send(self, message: Message) -> None:
        data = encode(message)
        with self._sending:
            self._outgoing.write(data)
            self._outgoing.flush()


def main() -> None:
    # A terminal's Ctrl-C reaches the whole group; it is our parent who decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    outgoing = int(sys.argv[1])
    os.set_inheritable(outgoing, False)
    with os.fdopen(outgoing, "wb") as pipe:
        Worker(sys.stdin.buffer, pipe).run()


if __name__ == "__main__":
    main()
