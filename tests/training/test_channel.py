"""A training and its supervisor, the training's side: it never fails or hangs because nobody answers."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.supervisor.channel import Channel as Server
from runner.supervisor.channel import Digest, Gone, Hello, Message, Progress, Remark, Saved, Snapshot
from runner.training import channel
from runner.training.channel import Channel

WELCOME = {"shared_memory": None, "room": 0, "why_not": "no /dev/shm here"}


class Supervisor:
    """The real server, and what it heard."""

    def __init__(self, path: Path) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.complaints: list[str] = []
        self.server = Server(
            lambda rank, message: self.heard.append((rank, message)), lambda: WELCOME, self.complaints.append
        )
        self.path = str(self.server.open(path))


def until(happens: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    one = Supervisor(tmp_path / "socket")
    yield one
    one.server.close()


def connected(path: str, rank: int = 0, world: int = 1) -> Channel:
    one = Channel.connect(rank, world, path)
    assert one is not None
    return one


def test_all_that_is_said_arrives(supervisor: Supervisor) -> None:
    one = connected(supervisor.path, 1, 2)
    assert (one.welcome.shared_memory, one.welcome.room, one.welcome.why_not) == ("", 0, "no /dev/shm here")
    one.progress(12, None, 1.5)
    assert one.snapshot("rank1-0", 7, 12, 0.25, "cadence")
    one.saved("step-000000000012", 12, 1.5, {"loss": 0.5})
    one.digest(12, "abc", "sampled")
    one.remark("not exact, because of\nthe threads")
    one.close()
    until(lambda: (1, Gone()) in supervisor.heard)
    hello, *rest = [message for _, message in supervisor.heard]
    assert isinstance(hello, Hello)
    assert (hello.rank, hello.world, hello.pid) == (1, 2, os.getpid())
    assert hello.threads is not None
    assert hello.cpu
    assert rest == [
        Progress(12, None, 1.5),
        Snapshot("rank1-0", 7, 12, 0.25, (), "cadence"),
        Saved("step-000000000012", 12, 1.5, (("loss", 0.5),)),
        Digest(12, "abc", "sampled"),
        Remark("not exact, because of the threads"),
        Gone(),
    ]
    assert supervisor.complaints == []


def test_wishes_and_answers_are_heard(supervisor: Supervisor) -> None:
    one = connected(supervisor.path)
    answers: list[tuple[str, int]] = []
    one.on_answer(lambda slot, sequence: answers.append((slot, sequence)))
    assert (one.asked, one.stop) == (False, False)
    supervisor.server.tell("save", {"reason": "notice", "deadline": None})
    until(lambda: one.asked)
    one.save_made()
    assert not one.asked
    supervisor.server.tell("persisted", {"slot": "rank0-0", "sequence": 7})
    supervisor.server.tell("refused", {"slot": "rank0-1", "sequence": 8, "reason": "disk full"})
    supervisor.server.tell("of a younger supervisor", {})
    supervisor.server.tell("stop", {"deadline": 5.0})
    until(lambda: one.stop)
    assert answers == [("rank0-0", 7), ("rank0-1", 8)]
    assert one.alive
    one.close()


def test_without_the_variable_there_is_no_supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(channel.VARIABLE, raising=False)
    assert Channel.connect(0, 1) is None
    monkeypatch.setenv(channel.VARIABLE, "")
    assert Channel.connect(0, 1) is None
    assert capsys.readouterr().err == ""


@contextmanager
def listener(path: Path, answer: bytes | None) -> Iterator[str]:
    """Somebody who says one thing to whoever comes, or nothing at all, and then listens no more."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        held: list[socket.socket] = []

        def work() -> None:
            connection, _ = server.accept()
            held.append(connection)
            connection.recv(1)
            if answer is not None:
                connection.sendall(answer)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield str(path)
        thread.join(5)
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    "answer", [None, b"nonsense\n", b"[1]\n", b'{"welcome": 3}\n', b'{"welcome": {"room": "much"}}\n']
)
def test_a_supervisor_that_makes_no_sense_is_none_and_that_is_said_once(
    tmp_path: Path, answer: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(channel, "HELLO_WITHIN_S", 0.5)
    with listener(tmp_path / "socket", answer) as path:
        assert Channel.connect(0, 1, path) is None
    said = capsys.readouterr().err
    assert said.startswith("cloudrun: the supervisor does not answer (")
    assert said.endswith("): checkpoints are written directly\n")
    assert said.count("\n") == 1


def test_no_socket_is_no_supervisor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Channel.connect(0, 1, str(tmp_path / "gone")) is None
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("last_words", [b"", b"nonsense\n", b"[1]\n", b'{"persisted": 3}\n'])
def test_when_the_supervisor_dies_or_raves_the_training_goes_on(
    tmp_path: Path, last_words: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    welcome = json.dumps({"welcome": {"version": 1, **WELCOME}}).encode() + b"\n"
    with listener(tmp_path / "socket", welcome + last_words) as path:
        one = connected(path)
        one.on_answer(lambda slot, sequence: None)
    until(lambda: not one.alive)
    assert not one.snapshot("rank0-0", 1, 1, 0.1, "cadence")
    one.progress(1, None, None)
    one.remark("anything")
    assert capsys.readouterr().err.count("does not listen any more") == 1


def test_one_who_does_not_read_costs_a_moment_not_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(channel, "SEND_WITHIN_S", 0.3)
    welcome = json.dumps({"welcome": {"version": 1, **WELCOME}}).encode() + b"\n"
    with listener(tmp_path / "socket", welcome) as path:
        one = connected(path)
        began = time.monotonic()
        while one.alive:
            one.remark("x" * 10_000)
            assert time.monotonic() - began < 20
        one.remark("and no more")
    assert "does not listen any more" in capsys.readouterr().err


def test_a_line_may_come_in_pieces(tmp_path: Path) -> None:
    welcome = json.dumps({"welcome": {"version": 1, **WELCOME}}).encode()
    got: dict[str, Any] = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()

        def work() -> None:
            connection = got["connection"] = server.accept()[0]
            for piece in (welcome[:20], welcome[20:], b"\n", b'{"sa', b've": {"reason": "x"}}\n{"st'):
                connection.sendall(piece)
                time.sleep(0.05)

        thread = threading.Thread(target=work)
        thread.start()
        one = connected(str(tmp_path / "socket"))
        until(lambda: one.asked)
        assert not one.stop
        thread.join()
        got["connection"].sendall(b'op": {}}\n')
        until(lambda: one.stop)
        one.close()
        got["connection"].close()
