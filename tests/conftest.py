"""What all tests share: settings, and small file systems for those that need a full or a read-only disk."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers.fixtures import fresh_bucket, ministack, moto, rclone, seaweedfs
from tests.servers.obs import obs

__all__ = ["fresh_bucket", "ministack", "moto", "obs", "rclone", "seaweedfs"]

# A change is judged by the same examples each time; new ones are looked for on developers' machines.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

Mount = Callable[[str], Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a tmpfs with the given options, as often as asked; unmounted at the end.

    The mount points are open to everybody: pytest's own folders are not.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        point = Path(tempfile.mkdtemp())
        point.chmod(0o755)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], check=False)
        if done.returncode:
            pytest.skip("this machine lets nobody mount")
        mounted.append(point)
        return point

    yield mount_tmpfs
    for point in mounted:
        subprocess.run(["umount", "-l", str(point)], check=True)
        point.rmdir()
