"""The manifest comes back as it was, and nothing hostile comes through."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint.manifest import FileEntry, Manifest, parse_manifest, signature, to_bytes, to_checkpoint
from runner.errors import CorruptData

ID = "step-000000001200.a7-3f9c2d"


def entry(path: str, size: int = 20, part_size: int = 16, mtime_ns: int = 5) -> FileEntry:
    return FileEntry(path, size, mtime_ns, "ab" * 32, part_size, tuple(range(-(-size // part_size))))


def manifest(**changes: Any) -> Manifest:
    base = Manifest(
        job="digits",
        run=1,
        attempt=7,
        attempt_id="3f9c2d",
        id=ID,
        step=1200,
        name="checkpoint-1200",
        kind="folder",
        format="transformers",
        created_at=1.7e9,
        spec_digest="d1",
        world_size=1,
        tool_version="0.1",
        host="box",
        environment={"OMP_NUM_THREADS": "2"},
        files=(entry("a.pt"), entry("b/ü c.bin", 0)),
    )
    return dataclasses.replace(base, **changes)


def raw(**changes: Any) -> bytes:
    return json.dumps(json.loads(to_bytes(manifest())) | changes).encode()


def raw_file(**changes: Any) -> bytes:
    return raw(files=[json.loads(to_bytes(manifest()))["files"][0] | changes])


def test_it_comes_back() -> None:
    assert parse_manifest(to_bytes(manifest())) == manifest()


def test_a_person_can_read_it() -> None:
    lines = to_bytes(manifest()).decode().splitlines()
    assert lines[1] == ' "attempt": 7,'
    assert len([line for line in lines if '"blake3"' in line]) == 2


def test_the_value_for_the_core() -> None:
    checkpoint = to_checkpoint(manifest())
    assert (checkpoint.id, checkpoint.step, checkpoint.name, checkpoint.attempt) == (ID, 1200, "checkpoint-1200", 7)
    assert (checkpoint.files, checkpoint.bytes, checkpoint.time) == (2, 20, 1.7e9)
    assert checkpoint.signature == signature(manifest().files)


def test_the_signature_knows_paths_sizes_and_times_and_nothing_else() -> None:
    one = signature([entry("a"), entry("b")])
    assert one == signature([entry("b"), dataclasses.replace(entry("a"), blake3="cd" * 32)])
    assert len({one, signature([entry("a")]), signature([entry("a"), entry("c")])}) == 3
    assert one != signature([entry("a"), entry("b", size=21)])
    assert one != signature([entry("a"), entry("b", mtime_ns=6)])


HOSTILE_PATHS = [
    "", "/etc/passwd", "../x", "a/../../x", "a/..", ".", "./a", "a//b", "a/", "/", "a\0b", "a\nb", "a\x7fb", "a\x9bb",
    "\ud800", "x" * 256, "a/" * 3000 + "a", "cloudrun-manifest.json",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(CorruptData):
        parse_manifest(raw_file(path=path))


@pytest.mark.parametrize("name", [*HOSTILE_PATHS[:-1], ".ssh", "tmp-x", "a.tmp", ".x/step-1", "step-1.part"])
def test_names_that_no_checkpoint_has_are_refused(name: str) -> None:
    with pytest.raises(CorruptData):
        parse_manifest(raw(name=name))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 200_000, b'{"version": 2}', b'{"version": true}',
        raw(version=2), raw(job=1), raw(job="a\nb"), raw(run=0), raw(run=True), raw(run="1"), raw(run=1.0),
        raw(step=-1), raw(step=1201), raw(step=10**400), raw(attempt=8), raw(attempt_id="000000"), raw(id="x"),
        raw(id="../" + ID), raw(kind="link"), raw(kind=None), raw(created_at=-1), raw(created_at=float("nan")),
        raw(created_at=float("inf")), raw(created_at=10**400), raw(created_at="now"), raw(world_size=0),
        raw(environment=[]), raw(environment={"a": 1}), raw(files=[]), raw(files={}), raw(files=[1]), raw(files=None),
        raw(kind="file"), raw_file(size=-1), raw_file(size="1"), raw_file(size=2**64), raw_file(mtime_ns=None),
        raw_file(blake3="AB" * 32), raw_file(blake3="ab"), raw_file(part_size=0), raw_file(part_size=-1),
        raw_file(crc32c=[1]), raw_file(crc32c=[1, 2, 3]), raw_file(crc32c=[1, -1]), raw_file(crc32c=[1, 2**32]),
        raw_file(crc32c=[1, True]), raw_file(crc32c="12"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptData, match="bad manifest"):
        parse_manifest(data)


def test_paths_must_not_clash() -> None:
    for paths in (["a", "a"], ["a", "a/b"], ["a/b/c", "a/b"]):
        with pytest.raises(CorruptData):
            parse_manifest(to_bytes(manifest(files=tuple(entry(path) for path in paths))))


def test_a_file_must_list_itself() -> None:
    good = manifest(kind="file", name="sub/ckpt.pt", files=(entry("ckpt.pt"),))
    assert parse_manifest(to_bytes(good)) == good
    with pytest.raises(CorruptData):
        parse_manifest(to_bytes(dataclasses.replace(good, files=(entry("other.pt"),))))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(json.loads(raw()))), JSON)
def test_no_value_in_any_place_does_more_than_be_refused(key: str, value: object) -> None:
    try:
        parse_manifest(raw(**{key: value}))
    except CorruptData as error:
        assert len(error.message) < 1000  # noqa: PT017 (most values are refused, some are fine)


@given(st.sampled_from(["path", "size", "mtime_ns", "blake3", "part_size", "crc32c"]), JSON)
def test_no_value_in_a_file_does_more_than_be_refused(key: str, value: object) -> None:
    try:
        parse_manifest(raw_file(**{key: value}))
    except CorruptData as error:
        assert len(error.message) < 10_000  # noqa: PT017 (see above)


@given(st.binary(max_size=60), st.integers(0, 2000))
def test_no_bytes_do_more_than_be_refused(noise: bytes, at: int) -> None:
    good = to_bytes(manifest())
    for data in (noise, good[:at] + noise + good[at + len(noise) :], good[:at]):
        try:
            parse_manifest(data)
        except CorruptData:
            continue


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "0.5", None])
def test_a_metric_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(CorruptData, match="a metric is no number"):
        parse_manifest(raw(metrics={"loss": value}))


def test_the_core_hears_of_metrics() -> None:
    assert to_checkpoint(manifest(metrics={"loss": 0.5, "acc": 1.0})).metrics == (("acc", 1.0), ("loss", 0.5))
