"""Downloads through a network that breaks: every byte is right, or there is an error."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from runner.errors import CorruptData, CredentialsExpired, ObjectChanged, StoreUnreachable
from runner.storage.opening import open_store
from tests.faults.campaign import WEIGHTS, is_object, knowable, patient, run_all, spoilt
from tests.faults.plans import STALLS, Fault, Kind, Once, Request
from tests.servers import Server

BUCKET = "faults-download"
SMALL = 200_000
LARGE = (64 << 20) + 12_345
"""Bytes of an object that comes in three ranges."""


Truth = dict[str, tuple[bytes, str]]
"""Content and version by key."""


@pytest.fixture(scope="module")
def truth(seaweedfs: Server) -> Truth:
    """Small objects and a large one, all with an MD5 for an ETag."""
    seaweedfs.make_bucket(BUCKET)
    client, dice = seaweedfs.client(), random.Random(3)
    contents = {f"small{number}": dice.randbytes(SMALL) for number in range(20)} | {"large": dice.randbytes(LARGE)}
    tags = {
        key: client.put_object(Bucket=BUCKET, Key=f"data/{key}", Body=data)["ETag"] for key, data in contents.items()
    }
    return {key: (data, tags[key].strip('"')) for key, data in contents.items()}


def download_small(server: Server, truth: Truth, folder: Path, seed: int, count: int) -> Counter[Kind]:
    with spoilt(server, BUCKET, seed) as (store, proxy):

        def download(number: int) -> None:
            key, target = f"small{number % 20}", folder / f"{number}"
            data, version = truth[key]
            store.download(key, target, version=version if number // 20 % 2 else None)
            assert target.read_bytes() == data
            target.unlink()

        run_all(download, count, seed)
        return proxy.done


def download_large(server: Server, truth: Truth, folder: Path, seed: int, count: int) -> Counter[Kind]:
    data, version = truth["large"]
    with spoilt(server, BUCKET, seed, patience=4) as (store, proxy):

        def download(number: int) -> None:
            target, flips = folder / f"{number}", proxy.done[Kind.FLIP_ANSWER]
            try:
                store.download("large", target, version=version if number % 2 else None)
            except CorruptData:
                # A bit in some range, three times in a row: bad luck that a large object may have.
                flips = proxy.done[Kind.FLIP_ANSWER] - flips
                assert flips >= 3
            else:
                assert target.read_bytes() == data
            target.unlink()

        run_all(download, count, seed, at_once=1)
        return proxy.done


def test_downloads_survive_two_hundred_faults(seaweedfs: Server, truth: Truth, tmp_path: Path) -> None:
    done = download_small(seaweedfs, truth, tmp_path, 1, 260) + download_large(seaweedfs, truth, tmp_path, 1, 10)
    assert done.total() >= 200
    assert done.keys() >= WEIGHTS.keys() - STALLS - {Kind.FLIP_REQUEST}  # these requests have no body


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_downloads_survive_random_faults(seaweedfs: Server, truth: Truth, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: {download_small(seaweedfs, truth, tmp_path, seed, 2000)}")
    print(f"seed {seed}: {download_large(seaweedfs, truth, tmp_path, seed, 150)}")


def test_a_download_goes_on_where_the_process_before_died(seaweedfs: Server, truth: Truth, tmp_path: Path) -> None:
    """Each call is a process without any patience: the first fault ends it, and the next one takes over."""
    data, version = truth["large"]
    with spoilt(seaweedfs, BUCKET, 4, probability=0.6, retry=patient(0.0), patience=4) as (
        store,
        proxy,
    ):
        for number in range(4):
            target, note, deaths = tmp_path / f"{number}", tmp_path / "note", 0
            while deaths < 300:
                try:
                    store.download("large", target, version=version, note=note)
                    break
                except (StoreUnreachable, CredentialsExpired, CorruptData):
                    deaths += 1
            assert not note.exists()
            assert target.read_bytes() == data
        assert proxy.done.total() >= 6


def test_small_reads_survive_faults(seaweedfs: Server, truth: Truth) -> None:
    with spoilt(seaweedfs, BUCKET, 5) as (store, proxy):

        def look(number: int) -> None:
            key = f"small{number % 20}"
            assert store.look(key) == truth[key]

        run_all(look, 100, 5)
        assert proxy.done.total() >= 70


def without_portals(request: Request, kind: Kind) -> bool:
    """After the first page ranges are read without obstore, and there half a refusal is not known for what it is."""
    return knowable(request, kind) and kind is not Kind.PORTAL


def test_another_version_is_never_taken_for_the_one_asked_for(seaweedfs: Server, truth: Truth, tmp_path: Path) -> None:
    with spoilt(seaweedfs, BUCKET, 6, allowed=without_portals) as (store, proxy):

        def download(number: int) -> None:
            with pytest.raises(ObjectChanged):
                store.download(f"small{number % 20}", tmp_path / f"{number}", version="0" * 32)

        run_all(download, 40, 6)
        assert proxy.done.total() >= 20


@pytest.fixture(scope="module")
def in_parts(seaweedfs: Server, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of ``parts``, which has no digest: its ETag is no MD5. More than a range."""
    seaweedfs.make_bucket("faults-length")
    source = tmp_path_factory.mktemp("parts") / "source"
    source.write_bytes(random.Random(7).randbytes(33 << 20))
    open_store("s3://faults-length/data", seaweedfs.access(), patient()).upload(source, "parts")
    return source.read_bytes()


@pytest.mark.parametrize("kind", [Kind.SHORTER, Kind.TRUNCATED, Kind.LONGER])
@pytest.mark.parametrize("at", [0.05, 0.5, 0.97])
def test_an_object_without_a_digest_keeps_its_length(
    seaweedfs: Server, in_parts: bytes, tmp_path: Path, kind: Kind, at: float
) -> None:
    """What the first answer claims of its length may be wrong."""
    with spoilt(seaweedfs, "faults-length", 7, patience=4) as (store, proxy):
        proxy.plan = Once(Fault(kind, at), concerns=is_object)
        store.download("parts", tmp_path / "target")
        assert proxy.done == {kind: 1}
    assert (tmp_path / "target").read_bytes() == in_parts
