"""The socket that trainers talk on: real connections, and what must not harm us."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.supervisor.channel import Channel, Digest, Gone, Hello, Message, Progress, Remark, Saved, Snapshot

HELLO = {"hello": {"version": 1, "rank": 0, "world": 1, "pid": 5}}


class Ear:
    """A channel and all that was heard on it."""

    def __init__(self, path: Path) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.complaints: list[str] = []
        self.channel = Channel(
            lambda rank, message: self.heard.append((rank, message)),
            lambda: {"shared_memory": "/dev/shm/x", "room": 7, "why_not": None},
            self.complaints.append,
        )
        self.path = self.channel.open(path)

    def connect(self, *lines: dict[str, Any]) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        connection.connect(os.fspath(self.path))
        for line in lines:
            say(connection, line)
        return connection

    def join(self, rank: int = 0, world: int = 1) -> socket.socket:
        """A rank that has been welcomed."""
        connection = self.connect({"hello": {"version": 1, "rank": rank, "world": world, "pid": 5}})
        assert listen(connection)["welcome"]["version"] == 1
        return connection


def say(connection: socket.socket, line: dict[str, Any]) -> None:
    connection.sendall(json.dumps(line).encode() + b"\n")


def listen(connection: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        got = connection.recv(1)
        assert got, "the connection was ended"
        line += got
    told: dict[str, Any] = json.loads(line)
    return told


def until(happens: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    one = Ear(tmp_path / "socket")
    yield one
    one.channel.close()


def test_every_kind_of_line_is_understood(ear: Ear) -> None:
    connection = ear.connect({"hello": {"version": 1, "rank": 1, "world": 2, "pid": 5, "threads": 4, "cpu": "AVX2"}})
    assert listen(connection) == {"welcome": {"version": 1, "shared_memory": "/dev/shm/x", "room": 7, "why_not": None}}
    say(connection, {"progress": {"step": 12, "total": None, "loss": 1.5}})
    snapshot = {"slot": "rank1-0", "sequence": 7, "step": 12, "stall": 0.1, "metrics": {"b": 2, "a": 1}}
    say(connection, {"snapshot": {**snapshot, "reason": "cadence"}})
    say(connection, {"saved": {"path": "/x/step-12", "step": 12, "seconds": 1.5, "metrics": {}}})
    say(connection, {"digest": {"step": 12, "value": "abc", "kind": "sampled"}})
    say(connection, {"something": "that a younger trainer says"})
    say(connection, {"remark": {"text": "one\x1b[31m\nline"}})
    connection.close()
    until(lambda: (1, Gone()) in ear.heard)
    assert ear.heard == [
        (1, Hello(1, 2, 5, 4, "AVX2")),
        (1, Progress(12, None, 1.5)),
        (1, Snapshot("rank1-0", 7, 12, 0.1, (("a", 1.0), ("b", 2.0)), "cadence")),
        (1, Saved("/x/step-12", 12, 1.5, ())),
        (1, Digest(12, "abc", "sampled")),
        (1, Remark("one [31m line")),
        (1, Gone()),
    ]
    assert ear.complaints == []


def test_a_loss_that_is_no_number_is_an_unknown_one(ear: Ear) -> None:
    connection = ear.join()
    for loss in (float("nan"), float("inf"), 10**400, 3):
        say(connection, {"progress": {"step": 1, "loss": loss}})
    until(lambda: len(ear.heard) == 5)
    assert [message.loss for _, message in ear.heard if isinstance(message, Progress)] == [None, None, None, 3.0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"nonsense\n", "no JSON"),
        (b"[" * 50_000 + b"\n", "no JSON"),
        (b'{"a": 1, "b": 2}\n', "one key"),
        (b"[1]\n", "one key"),
        (b'{"progress": 3}\n', "a progress that is no object"),
        (b'{"progress": {"step": -1}}\n', "a step that is no count"),
        (b'{"progress": {"step": true}}\n', "a step that is no count"),
        (b'{"progress": {"step": 1, "loss": "low"}}\n', "a loss that is no number"),
        (b'{"snapshot": {"slot": "../../etc", "sequence": 1, "step": 1}}\n', "a slot that has no such name"),
        (b'{"remark": {"text": 3}}\n', "a text that is no text"),
        (b'{"saved": {"path": "x", "step": 1, "metrics": [1]}}\n', "metrics that are no small object"),
        (json.dumps(HELLO).encode() + b"\n", "hello twice"),
        (b"x" * 200_000, "a line that does not end"),
        (b"\xff\xfe\n", "no JSON"),
    ],
)
def test_who_talks_nonsense_is_cut_off_and_nobody_else_is(ear: Ear, line: bytes, complaint: str) -> None:
    good, bad = ear.join(0, 2), ear.join(1, 2)
    try:
        bad.sendall(line)
        assert bad.recv(1) == b""
    except ConnectionError:
        pass  # cut off while it was still talking
    until(lambda: ear.complaints)
    (said,) = ear.complaints
    assert said.startswith("rank 1 said ")
    assert complaint in said
    say(good, {"progress": {"step": 3}})
    until(lambda: (0, Progress(3, None, None)) in ear.heard)


@pytest.mark.parametrize(
    "first",
    [
        {"progress": {"step": 1}},
        {"hello": {"version": 2, "rank": 0, "world": 1, "pid": 5}},
        {"hello": {"version": 1, "rank": 3, "world": 2, "pid": 5}},
        {"hello": {"version": 1, "rank": 0, "world": 10**9, "pid": 5}},
    ],
)
def test_who_does_not_say_a_proper_hello_is_not_heard(ear: Ear, first: dict[str, Any]) -> None:
    connection = ear.connect(first)
    assert connection.recv(1) == b""
    until(lambda: ear.complaints)
    assert ear.complaints[0].startswith("somebody said ")
    assert ear.heard == []


def test_all_ranks_hear_what_is_for_all_and_one_what_is_for_it(ear: Ear) -> None:
    ranks = [ear.join(rank, 3) for rank in range(3)]
    ear.channel.tell("save", {"reason": "notice", "deadline": 5.0})
    ear.channel.tell("persisted", {"slot": "rank1-0", "sequence": 7}, rank=1)
    assert [listen(rank) for rank in ranks] == [{"save": {"reason": "notice", "deadline": 5.0}}] * 3
    assert listen(ranks[1]) == {"persisted": {"slot": "rank1-0", "sequence": 7}}
    ranks[2].settimeout(0.2)
    with pytest.raises(TimeoutError):
        ranks[2].recv(1)


def test_one_who_does_not_listen_holds_up_nobody(ear: Ear) -> None:
    deaf, good = ear.join(0, 2), ear.join(1, 2)
    for number in range(200):
        ear.channel.tell("remark", {"text": "x" * 4096}, rank=0)
        ear.channel.tell("note", {"number": number}, rank=1)
    assert [listen(good)["note"]["number"] for _ in range(200)] == list(range(200))
    until(lambda: (0, Gone()) in ear.heard)
    deaf.close()


def test_nobody_else_may_connect(ear: Ear) -> None:
    assert ear.path.stat().st_mode & 0o777 == 0o600


def test_a_path_that_is_too_long_for_a_socket_gets_a_short_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    ear = Ear(folder / "socket")
    try:
        assert not ear.path.is_relative_to(folder)
        assert ear.path.parent.stat().st_mode & 0o777 == 0o700
        ear.join().close()
    finally:
        ear.channel.close()
    assert not ear.path.parent.exists()


def test_what_was_said_before_the_end_is_heard_and_nothing_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    ear = Ear(tmp_path / "socket")
    connection = ear.join()
    connection.sendall(b"".join(b'{"progress": {"step": %d}}\n' % step for step in range(1, 20_000)))
    ear.channel.close()
    assert ear.heard[-1] == (0, Progress(19_999, None, None))
    assert os.listdir(tmp_path) == []
    assert threading.active_count() == before
    assert connection.recv(1) == b""


def test_many_ranks_come_and_go(ear: Ear) -> None:
    for _ in range(3):
        ranks = [ear.join(rank, 64) for rank in range(64)]
        for rank in ranks:
            rank.close()
    until(lambda: sum(isinstance(message, Gone) for _, message in ear.heard) == 192)
    assert ear.complaints == []


def test_a_place_where_no_socket_can_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        Ear(tmp_path / "file" / "socket")
