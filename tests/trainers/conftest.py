"""What the tests of trainers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    one = Machine(tmp_path / "machine", tmp_path / "store")
    yield one
    one.kill_all()
