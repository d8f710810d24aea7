"""Clients of the transfer benchmark that are libraries: boto3, obstore, and cloudrun's upload. One process, one task.

    python -m scripts.bench.clients CLIENT TASK ENDPOINT BUCKET PREFIX FOLDER

Credentials come from the environment. Large tasks take FOLDER/large.bin to or from PREFIXlarge.bin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGE = "large.bin"
PART = 16 << 20
RANGE = 32 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where the objects are and where the files."""

    endpoint: str
    bucket: str
    prefix: str
    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / key.removeprefix(self.prefix)

    def key(self, path: Path) -> str:
        return self.prefix + path.name

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())


def main() -> None:
    client, task, endpoint, bucket, prefix, folder = sys.argv[1:]
    TASKS[client, task](Place(endpoint, bucket, prefix, Path(folder)))


def in_threads(work: Callable[[Any], object], items: Iterable[Any], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items):
            pass


def check_sizes(place: Place, listed: Iterator[tuple[str, int]]) -> None:
    """What a sync has to do when nothing is to be done."""
    wrong = [key for key, size in listed if place.path(key).stat().st_size != size]
    if wrong:
        sys.exit(f"error: {len(wrong)} files differ")


# boto3, as its guide says; small objects by a pool, since download_file costs 5 ms of CPU each


def boto3_client(place: Place, pool: int = 10) -> Any:
    import boto3  # noqa: PLC0415 - only the client that is measured is loaded
    from botocore.config import Config  # noqa: PLC0415

    config = Config(s3={"addressing_style": "path"}, max_pool_connections=pool, proxies={})
    return boto3.client("s3", endpoint_url=place.endpoint, config=config)


def boto3_listing(client: Any, place: Place) -> Iterator[tuple[str, int]]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
    return ((entry["Key"], entry["Size"]) for page in pages for entry in page.get("Contents", ()))


def boto3_down_small(place: Place) -> None:
    client = boto3_client(place)

    def get(key: str) -> None:
        place.path(key).write_bytes(client.get_object(Bucket=place.bucket, Key=key)["Body"].read())

    in_threads(get, [key for key, _ in boto3_listing(client, place)], 8)


def boto3_no_op(place: Place) -> None:
    check_sizes(place, boto3_listing(boto3_client(place), place))


def boto3_down_large(place: Place) -> None:
    boto3_client(place).download_file(place.bucket, place.prefix + LARGE, str(place.folder / LARGE))


def boto3_up_large(place: Place) -> None:
    boto3_client(place).upload_file(str(place.folder / LARGE), place.bucket, place.prefix + LARGE)


def boto3_up_small(place: Place) -> None:
    client = boto3_client(place)

    def put(path: Path) -> None:
        client.put_object(Bucket=place.bucket, Key=place.key(path), Body=path.read_bytes())

    in_threads(put, place.files(), 8)


# obstore, bare: no conditions, no checks, no temporary names


def obstore_store(place: Place) -> Any:
    from obstore.store import S3Store  # noqa: PLC0415 - only the client that is measured is loaded

    return S3Store(
        place.bucket,
        endpoint=place.endpoint,
        region=os.environ["AWS_REGION"],
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def obstore_listing(store: Any, place: Place) -> Iterator[tuple[str, int]]:
    return ((entry["path"], entry["size"]) for page in store.list(place.prefix) for entry in page)


def obstore_down_small(place: Place) -> None:
    store = obstore_store(place)

    def get(key: str) -> None:
        with open(place.path(key), "wb", 0) as file:
            file.write(store.get(key).bytes())

    in_threads(get, [key for key, _ in obstore_listing(store, place)], 16)


def obstore_no_op(place: Place) -> None:
    check_sizes(place, obstore_listing(obstore_store(place), place))


def obstore_down_large(place: Place) -> None:
    store, key = obstore_store(place), place.prefix + LARGE
    size = store.head(key)["size"]
    fd = os.open(place.folder / LARGE, os.O_WRONLY | os.O_CREAT)

    def get(start: int) -> None:
        at = start
        answer = store.get(key, options={"range": (start, min(start + RANGE, size))})
        for chunk in answer.stream(min_chunk_size=256 << 10):
            at += os.pwrite(fd, chunk, at)

    in_threads(get, range(0, size, RANGE), 4)
    os.close(fd)


def obstore_up_large(place: Place) -> None:
    obstore_store(place).put(place.prefix + LARGE, place.folder / LARGE, chunk_size=PART, max_concurrency=8)


def obstore_up_small(place: Place) -> None:
    store = obstore_store(place)
    in_threads(lambda path: store.put(place.key(path), path.read_bytes()), place.files(), 16)


# cloudrun: the product's own store, with the digest of every byte that it sends


def cloudrun_up(place: Place) -> None:
    from blake3 import blake3  # noqa: PLC0415 - only the client that is measured is loaded

    from runner.storage.access import Access  # noqa: PLC0415
    from runner.storage.opening import open_store  # noqa: PLC0415
    from runner.storage.retrying import Retry  # noqa: PLC0415

    access = Access(endpoint=place.endpoint, region=os.environ["AWS_REGION"], environ=dict(os.environ))
    store = open_store(f"s3://{place.bucket}/{place.prefix}", access, Retry(60.0))

    def add_to(digest: blake3, data: memoryview) -> None:
        digest.update(data)

    def put(path: Path) -> None:
        digests = []

        def sink() -> Callable[[memoryview], None]:
            digest = blake3()
            digests.append(digest)
            return lambda data: add_to(digest, data)

        store.upload(path, path.name, sink=sink)
        digests[-1].hexdigest()

    in_threads(put, place.files(), 16)


# What is not measured: buckets come and go


def make_bucket(place: Place) -> None:
    boto3_client(place).create_bucket(Bucket=place.bucket)


def drop_bucket(place: Place) -> None:
    client = boto3_client(place)
    keys = [key for key, _ in boto3_listing(client, place)]
    for at in range(0, len(keys), 1000):
        doomed = [{"Key": key} for key in keys[at : at + 1000]]
        client.delete_objects(Bucket=place.bucket, Delete={"Objects": doomed, "Quiet": True})
    client.delete_bucket(Bucket=place.bucket)


TASKS: dict[tuple[str, str], Callable[[Place], None]] = {
    ("boto3", "down-small"): boto3_down_small,
    ("boto3", "no-op"): boto3_no_op,
    ("boto3", "down-large"): boto3_down_large,
    ("boto3", "up-large"): boto3_up_large,
    ("boto3", "up-small"): boto3_up_small,
    ("obstore", "down-small"): obstore_down_small,
    ("obstore", "no-op"): obstore_no_op,
    ("obstore", "down-large"): obstore_down_large,
    ("obstore", "up-large"): obstore_up_large,
    ("obstore", "up-small"): obstore_up_small,
    ("cloudrun", "up-large"): cloudrun_up,
    ("cloudrun", "up-small"): cloudrun_up,
    ("bucket", "make"): make_bucket,
    ("bucket", "drop"): drop_bucket,
}

if __name__ == "__main__":
    main()
