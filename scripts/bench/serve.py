"""Runs one server for the transfer benchmark, in a process of its own, until its standard input ends.

    python -m scripts.bench.serve nginx FOLDER BUCKET [SECONDS_OF_LATENCY]
    python -m scripts.bench.serve seaweedfs FOLDER BUCKET

Prints one line of JSON: endpoint, access key, secret key.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench.nulls3 import null_s3


def main() -> None:
    kind, folder, bucket, *latency = sys.argv[1:]
    opened = nginx(Path(folder), bucket, *latency) if kind == "nginx" else seaweedfs(Path(folder), bucket)
    with opened as told:
        print(json.dumps(told), flush=True)
        sys.stdin.read()


@contextmanager
def nginx(folder: Path, bucket: str, latency: str = "0") -> Iterator[dict[str, str]]:
    with null_s3(folder, bucket, float(latency)) as endpoint:
        yield {"endpoint": endpoint, "access_key": "bench", "secret_key": "bench-secret"}


@contextmanager
def seaweedfs(folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    from tests import servers  # noqa: PLC0415 - boto3 comes with it

    # Its data goes where the benchmark's does.
    os.environ["TMPDIR"] = str(folder)
    with servers.seaweedfs() as server:
        server.make_bucket(bucket)
        yield {"endpoint": server.endpoint, "access_key": server.access_key, "secret_key": server.secret_key}


if __name__ == "__main__":
    main()
