"""Durations and sizes: what is read, what is refused, what people see."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("3m20s", 200),
        (" 10 m ", 600),
        ("0s", 0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "10", "m", "-5s", "5 minutes", "10x", "5s10m", "5m5m", "1e3s", "٣s", "9" * 12 + "d"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 10m, 2h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GiB", 200 * 2**30),
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("1.5KiB", 1536),
        ("17", 17),
        ("17B", 17),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "5G", "5 gigabytes", "1e9", "5ib", "٣GB", "999999PiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="200GiB, 5GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.45, "450ms"),
        (0.9999, "1s"),
        (3.21, "3.2s"),
        (59.7, "1m"),
        (200, "3m20s"),
        (3600, "1h"),
        (7510, "2h5m"),
        (97200, "1d3h"),
        (-200, "-3m20s"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023.99, "1 KiB"),
        (1536, "1.5 KiB"),
        (1_503_238_553, "1.4 GiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 10**8))
def test_a_formatted_duration_reads_back_as_nearly_the_same(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.03)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_duration, parse_size):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0
