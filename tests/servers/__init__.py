"""Real object servers for tests: started on free ports of 127.0.0.1, stopped and swept away at the end.

Each is a context manager that yields a :class:`Server` which answers already:

    with seaweedfs() as server:
        server.make_bucket("first")

seaweedfs   verifies signatures and checksums, honours conditions; lists in an order that is not S3's
ministack   takes odd keys (``..``, ``//``, newlines), verifies checksums; knows no credentials; has STS
moto        in this process; forgiving; has STS
rclone      verifies signatures, ignores conditions
"""

from __future__ import annotations

from tests.servers.s3 import Server, ministack, moto, rclone, seaweedfs

__all__ = ["Server", "ministack", "moto", "rclone", "seaweedfs"]
