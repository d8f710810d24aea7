"""The CRC32C of a whole from those of its pieces, which come in any order: no byte is looked at again.

A CRC is the remainder of a polynomial; to put ``n`` bytes behind a piece multiplies it by x to the power of ``8 n``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, lowest power first, as in RFC 3720."""

_ONE = 1 << 31
_X_TO_THE_8 = 1 << 23


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """The checksum of all pieces, one after the other; each is told by its checksum and its number of bytes."""
    whole = 0
    for checksum, size in pieces:
        whole = _product(_shift(size), whole) ^ checksum
    return whole


@cache
def _shift(size: int) -> int:
    """X to the power of ``8 size``."""
    power, result = _X_TO_THE_8, _ONE
    while size:
        if size & 1:
            result = _product(power, result)
        power = _product(power, power)
        size >>= 1
    return result


def _product(one: int, other: int) -> int:
    """Of two polynomials, modulo Castagnoli's."""
    result = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            result ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result
