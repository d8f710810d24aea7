"""What a captive portal says, 200 and a page, is no answer of a store, and never taken for one: an operation that meets
it says so, or tries again and does what it promises.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.errors import ObjectMissing, StoreError
from runner.storage.api import ObjectStore
from tests.faults.campaign import spoilt
from tests.faults.plans import Fault, Kind, Once, nothing
from tests.servers import Server

BUCKET = "faults-portal"
IN_PARTS = b"in two parts " * (17 << 20 >> 3)
Operation = Callable[[ObjectStore, Path], Any]


@pytest.fixture(scope="module")
def server(seaweedfs: Server) -> Server:
    seaweedfs.make_bucket(BUCKET)
    return seaweedfs


def download(store: ObjectStore, folder: Path) -> bytes:
    store.download("old", folder / "target")
    return (folder / "target").read_bytes()


def upload(store: ObjectStore, folder: Path, data: bytes) -> bytes:
    (folder / "source").write_bytes(data)
    store.upload(folder / "source", "new")
    return data


def copy(store: ObjectStore, _folder: Path) -> bytes:
    store.copy("old", "new")
    return b"old"


def write(store: ObjectStore, data: bytes, **condition: Any) -> bytes:
    store.write("new", data, **condition)
    return data


READING: dict[str, Operation] = {
    "read": lambda store, _: store.read("old"),
    "look": lambda store, _: store.look("old")[0],
    "download": download,
}
WRITING: dict[str, Operation] = {
    "write": lambda store, _: write(store, b"written"),
    "write only new": lambda store, _: write(store, b"alone", only_new=True),
    "upload": lambda store, folder: upload(store, folder, b"uploaded"),
    "upload in parts": lambda store, folder: upload(store, folder, IN_PARTS),
    "copy": copy,
}


def at(nth: int) -> Once:
    """A plan that lets so many requests pass, and answers the next one as a portal does."""
    passed: list[None] = []

    def is_the_one(_request: object) -> bool:
        passed.append(None)
        return len(passed) > nth

    return Once(Fault(Kind.PORTAL), concerns=is_the_one)


def there(server: Server, key: str) -> bytes | None:
    client = server.client()
    try:
        return bytes(client.get_object(Bucket=BUCKET, Key=f"data/{key}")["Body"].read())
    except client.exceptions.NoSuchKey:
        return None


@pytest.mark.parametrize("name", READING)
def test_a_page_is_not_read_as_an_object(server: Server, tmp_path: Path, name: str) -> None:
    with spoilt(server, BUCKET, 1) as (store, proxy):
        proxy.plan = nothing
        store.write("old", b"old")
        proxy.plan = at(0)
        try:
            assert READING[name](store, tmp_path) == b"old"
        except StoreError as error:
            assert not isinstance(error, ObjectMissing)  # noqa: PT017 - either way is right
        assert proxy.done == {Kind.PORTAL: 1}


@pytest.mark.parametrize("nth", range(5))
@pytest.mark.parametrize("name", WRITING)
def test_a_page_does_not_say_that_something_is_written(server: Server, tmp_path: Path, name: str, nth: int) -> None:
    with spoilt(server, BUCKET, 1, patience=4) as (store, proxy):
        proxy.plan = nothing
        store.write("old", b"old")
        store.delete(["new"])
        assert store.exclusive
        proxy.plan = at(nth)
        try:
            assert WRITING[name](store, tmp_path) == there(server, "new")
        except StoreError as error:
            assert not isinstance(error, ObjectMissing)  # noqa: PT017 - either way is right


def test_a_page_does_not_say_that_something_is_deleted(server: Server) -> None:
    with spoilt(server, BUCKET, 1) as (store, proxy):
        proxy.plan = nothing
        store.write("doomed", b"x")
        proxy.plan = at(0)
        try:
            store.delete(["doomed"])
        except StoreError:
            return
        assert there(server, "doomed") is None


def test_a_page_is_no_listing(server: Server) -> None:
    with spoilt(server, BUCKET, 1) as (store, proxy):
        proxy.plan = nothing
        store.write("in/listed", b"x")
        listings: tuple[tuple[Callable[[], list[str]], str], ...] = (
            (lambda: [info.key for info in store.list("in/")], "in/listed"),
            (lambda: list(store.folders()), "in"),
        )
        for names, name in listings:
            proxy.plan = at(0)
            try:
                assert name in names()
            except StoreError:
                continue


def test_a_page_does_not_disprove_conditions(server: Server) -> None:
    for nth in range(6):
        with spoilt(server, BUCKET, 1) as (store, proxy):
            proxy.plan = at(nth)
            try:
                assert store.exclusive
            except StoreError:
                continue
