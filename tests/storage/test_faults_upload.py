"""Uploads through a network that breaks: what is stored is what was sent, or there is an error."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from runner.errors import CredentialsExpired, StoreError, StoreUnreachable
from runner.storage.api import Sink
from tests.faults.campaign import WEIGHTS, patient, run_all, spoilt
from tests.faults.plans import BODIES, STALLS, Fault, Kind, Once
from tests.servers import Server

SMALL = 200_000
IN_PARTS = (33 << 20) + 12_345
"""Bytes of a file that goes in three parts."""


class Everything:
    """A sink that keeps what it saw, over all readings of the file the last."""

    def __init__(self) -> None:
        self.seen = bytearray()

    def __call__(self) -> Sink:
        self.seen.clear()
        return self.seen.extend


def content(seed: int, number: int, size: int) -> bytes:
    return random.Random(f"{seed} {number}").randbytes(size)


def upload_all(server: Server, folder: Path, seed: int, count: int, size: int) -> Counter[Kind]:
    """Upload files of ``size`` bytes; returns what happened to their requests."""
    bucket, large = f"faults-upload-{seed}-{size}", size > SMALL
    server.make_bucket(bucket)
    client = server.client()
    with spoilt(server, bucket, seed, patience=4 if large else 1) as (store, proxy):

        def upload(number: int) -> None:
            data, source, sink = content(seed, number, size), folder / f"{number}", Everything()
            source.write_bytes(data)
            info = store.upload(source, f"{number}", sink=sink)
            source.unlink()
            there = client.get_object(Bucket=bucket, Key=f"data/{number}")
            assert there["Body"].read() == data
            assert (info.key, info.size, f'"{info.version}"') == (f"{number}", size, there["ETag"])
            assert sink.seen == data

        run_all(upload, count, seed, at_once=1 if large else 4)
        return proxy.done


def test_uploads_survive_two_hundred_faults(seaweedfs: Server, tmp_path: Path) -> None:
    done = upload_all(seaweedfs, tmp_path, 1, 230, SMALL) + upload_all(seaweedfs, tmp_path, 1, 8, IN_PARTS)
    assert done.total() >= 200
    assert done.keys() >= WEIGHTS.keys() - STALLS - BODIES  # next to no answer has a body


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "size"), [(2000, SMALL), (100, IN_PARTS)])
def test_uploads_survive_random_faults(seaweedfs: Server, tmp_path: Path, count: int, size: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: {upload_all(seaweedfs, tmp_path, seed, count, size)}")


def test_an_upload_goes_on_where_the_process_before_died(seaweedfs: Server, tmp_path: Path) -> None:
    """Each call is a process without any patience: the first fault ends it, and the next one takes over."""
    seed, bucket = 2, "faults-upload-on"
    seaweedfs.make_bucket(bucket)
    source, note = tmp_path / "source", tmp_path / "note"
    with spoilt(seaweedfs, bucket, seed, probability=0.6, retry=patient(0.0), patience=4) as (store, proxy):
        for number in range(2):
            source.write_bytes(content(seed, number, IN_PARTS))
            deaths = 0
            while deaths < 300:
                try:
                    store.upload(source, f"{number}", note=note)
                    break
                except (StoreUnreachable, CredentialsExpired):
                    deaths += 1
            assert not note.exists()
            there = seaweedfs.client().get_object(Bucket=bucket, Key=f"data/{number}")["Body"].read()
            assert there == source.read_bytes()
        assert proxy.done.total() >= 4


@pytest.mark.parametrize("size", [SMALL, IN_PARTS])
def test_a_flipped_bit_is_not_stored(seaweedfs: Server, tmp_path: Path, size: int) -> None:
    """Also where the server does not compare the bytes with their signature: its ETag tells what it has."""
    bucket, source = f"faults-flipped-{size}", tmp_path / "source"
    seaweedfs.make_bucket(bucket)
    source.write_bytes(content(3, 0, size))
    with spoilt(seaweedfs, bucket, 3, patience=4) as (store, proxy):
        proxy.plan = Once(Fault(Kind.FLIP_REQUEST), concerns=lambda request: request.method == "PUT")
        store.upload(source, "flipped")
        assert proxy.done == {Kind.FLIP_REQUEST: 1}
    assert seaweedfs.client().get_object(Bucket=bucket, Key="data/flipped")["Body"].read() == source.read_bytes()


@pytest.mark.parametrize("method", ["HEAD", "PUT", "POST"])
def test_half_the_head_of_an_answer_is_no_answer(seaweedfs: Server, tmp_path: Path, method: str) -> None:
    """Python's http.client takes the end of the connection for the end of the head."""
    bucket, source = f"faults-head-{method.lower()}", tmp_path / "source"
    seaweedfs.make_bucket(bucket)
    source.write_bytes(content(4, 0, (16 << 20) + 1))
    with spoilt(seaweedfs, bucket, 4, patience=4) as (store, proxy):
        for percent in range(0, 100, 7):
            plan = Once(Fault(Kind.CUT_ANSWER, percent / 100), concerns=lambda request: request.method == method)
            proxy.plan = plan
            try:
                info = store.upload(source, f"{percent}")
            except StoreError:
                continue
            there = seaweedfs.client().get_object(Bucket=bucket, Key=f"data/{percent}")
            assert (info.size, f'"{info.version}"') == (source.stat().st_size, there["ETag"])
            assert there["Body"].read() == source.read_bytes()
