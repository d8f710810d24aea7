"""Copies fall back, system errors become ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from runner.errors import AccessDenied, BadKey, CloudrunError, DiskFull, StoreError, StoreUnreachable
from runner.storage.local import COPY_STEPS, CopyStep, as_ours, copy_bytes, no_room


def refuses(code: int) -> CopyStep:
    def step(source: int, target: int, count: int) -> int:
        raise OSError(code, os.strerror(code))

    return step


def claims_the_end(source: int, target: int, count: int) -> int:
    return 0


@pytest.mark.parametrize(
    "steps",
    [
        *[(step,) for step in COPY_STEPS],
        COPY_STEPS,
        (refuses(errno.EXDEV), *COPY_STEPS[1:]),
        (refuses(errno.EXDEV), refuses(errno.EINVAL), COPY_STEPS[2]),
        (claims_the_end, claims_the_end, COPY_STEPS[2]),
    ],
)
def test_every_way_of_copying_gives_the_same_bytes(tmp_path: Path, steps: tuple[CopyStep, ...]) -> None:
    data, moved = os.urandom(9 << 20), list[int]()
    (tmp_path / "a").write_bytes(data)
    with (tmp_path / "a").open("rb", 0) as source, (tmp_path / "b").open("wb", 0) as target:
        assert copy_bytes(source.fileno(), target.fileno(), len(data), moved.append, steps) == len(data)
    assert (tmp_path / "b").read_bytes() == data
    assert sum(moved) == len(data)


def test_a_file_that_ends_early_is_reported_as_short(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"short")
    with (tmp_path / "a").open("rb", 0) as source, (tmp_path / "b").open("wb", 0) as target:
        assert copy_bytes(source.fileno(), target.fileno(), 100) == 5


def test_real_trouble_is_not_hidden_by_a_fallback(tmp_path: Path) -> None:
    with (tmp_path / "b").open("wb", 0) as target, pytest.raises(OSError, match="space"):
        copy_bytes(0, target.fileno(), 1, steps=(refuses(errno.ENOSPC), *COPY_STEPS))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EIO, StoreUnreachable),
        (errno.ESTALE, StoreUnreachable),
        (errno.ETIMEDOUT, StoreUnreachable),
        (errno.ENOTCONN, StoreUnreachable),
        (errno.ENAMETOOLONG, BadKey),
        (errno.ENOTEMPTY, StoreError),
    ],
)
def test_system_errors_are_ours(code: int, kind: type[CloudrunError]) -> None:
    error = as_ours(OSError(code, os.strerror(code)), "the file")
    assert type(error) is kind
    assert error.message.startswith("the file: ")


def test_no_room_says_what_is_missing() -> None:
    assert no_room("on /c", 3 << 30, 1 << 30).message == ("no room: needs 3 GiB, 1 GiB free on /c, 2 GiB missing")
    assert "quota" in no_room("on /c", 1, 2).hint
