"""Checksums of pieces, put together."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from runner.storage.joining import joined


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_pieces_have_the_checksum_of_the_whole(pieces: list[bytes]) -> None:
    assert joined((crc32c(piece), len(piece)) for piece in pieces) == crc32c(b"".join(pieces))


def test_large_pieces() -> None:
    pieces = [bytes([number]) * ((5 << 20) + number) for number in range(3)]
    assert joined((crc32c(piece), len(piece)) for piece in pieces) == crc32c(b"".join(pieces))
    assert joined([]) == 0
