"""One server of each kind for all tests of a worker. Tests use a bucket, or a prefix, of their own.

``pytest_plugins`` in ``tests/conftest.py`` makes them known everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from tests import servers
from tests.servers import Server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[Server]:
    with servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def ministack() -> Iterator[Server]:
    with servers.ministack() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[Server]:
    with servers.rclone() as server:
        yield server


@pytest.fixture
def fresh_bucket() -> Callable[[Server], str]:
    """Makes a bucket that no other test uses; returns its name."""

    def make(server: Server) -> str:
        name = f"test-{uuid4().hex[:12]}"
        server.make_bucket(name)
        return name

    return make
