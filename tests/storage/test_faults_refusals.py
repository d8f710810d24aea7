"""Refusals that another try cures: credentials that have run out, a clock that is being set, a store that is busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.storage.api import ObjectStore
from tests.faults.campaign import spoilt
from tests.faults.plans import Fault, Kind, Once, nothing
from tests.servers import Server

BUCKET = "faults-refusals"
IN_PARTS = (16 << 20) + 1


@pytest.fixture(scope="module")
def server(seaweedfs: Server) -> Server:
    seaweedfs.make_bucket(BUCKET)
    return seaweedfs


def download(store: ObjectStore, folder: Path) -> bytes:
    store.download("there", folder / "target")
    return (folder / "target").read_bytes()


def upload(store: ObjectStore, folder: Path) -> int:
    (folder / "source").write_bytes(bytes(IN_PARTS))
    return store.upload(folder / "source", "new").size


OPERATIONS: dict[str, tuple[Callable[[ObjectStore, Path], Any], Any]] = {
    "read": (lambda store, _: store.read("there"), b"there"),
    "download": (download, b"there"),
    "list": (lambda store, _: [info.key for info in store.list("there")], ["there"]),
    "folders": (lambda store, _: list(store.folders()), ["folder"]),
    "write": (lambda store, _: store.write("new", b"new").size, 3),
    "upload": (upload, IN_PARTS),
    "copy": (lambda store, _: store.copy("there", "new").size, 5),
    "delete": (lambda store, _: store.delete(["new"]), None),
}


@pytest.mark.parametrize("kind", [Kind.ERROR_500, Kind.SLOW_DOWN, Kind.SKEWED, Kind.EXPIRED, Kind.EXPIRED_403])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_tries_again(server: Server, tmp_path: Path, name: str, kind: Kind) -> None:
    """Whichever of its requests is refused."""
    operation, expected = OPERATIONS[name]
    with spoilt(server, BUCKET, 1, patience=4) as (store, proxy):
        proxy.plan = nothing
        store.write("there", b"there")
        store.write("folder/x", b"")
        before = len(proxy.seen)
        operation(store, tmp_path)
        for nth in range(len(proxy.seen) - before):
            passed: list[None] = []
            proxy.plan = Once(Fault(kind), concerns=lambda _, nth=nth, passed=passed: _count(passed) > nth)  # type: ignore[misc]
            assert operation(store, tmp_path) == expected
        assert proxy.done[kind] >= 1


def _count(passed: list[None]) -> int:
    passed.append(None)
    return len(passed)
