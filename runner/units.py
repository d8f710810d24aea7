"""Durations and sizes as people write them, and as people read them."""

from __future__ import annotations

import re

DURATION_FORMS = "a duration such as 90s, 10m, 2h, 1d, 500ms or 1h30m"
SIZE_FORMS = "a size such as 200GiB, 5GB, 500MB or a number of bytes"

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
_BYTES |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)}

_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?(ms|[smhd])", re.ASCII)
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgtp]?i?b|)", re.ASCII | re.IGNORECASE)
_LONGEST = 1000 * 365 * 86400.0
_LARGEST = 2**63 - 1


def parse_duration(text: str) -> float:
    """Seconds. Parts may be joined, largest unit first (``1h30m``). Raises ValueError that names the right forms."""
    parts = _DURATION_PART.findall(text.strip())
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    units = [_SECONDS[unit] for _, unit in parts]
    whole = re.sub(" ", "", text) == "".join(number + unit for number, unit in parts)
    if not parts or not whole or units != sorted(set(units), reverse=True) or seconds > _LONGEST:
        raise ValueError(f"not {DURATION_FORMS}")
    return seconds


def parse_size(text: str) -> int:
    """Bytes. GB is a thousand million, GiB is 2**30. Raises ValueError that names the right forms."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError(f"not {SIZE_FORMS}")
    number, factor = match[1], _BYTES[match[2].lower()]
    size = round(float(number) * factor) if "." in number else int(number) * factor
    if size > _LARGEST:
        raise ValueError(f"too large: not {SIZE_FORMS}")
    return size


def format_duration(seconds: float) -> str:
    """``450ms``, ``3.2s``, ``3m20s``, ``2h5m``, ``1d3h``: the two largest units, short enough for a status line."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 0.9995:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    if seconds < 9.95:
        return f"{seconds:.1f}s".replace(".0s", "s")
    return _two_units(round(seconds))


def _two_units(seconds: int) -> str:
    if seconds >= 86400:
        step, names = 3600, ("d", "h", 24)
    elif seconds >= 3600:
        step, names = 60, ("h", "m", 60)
    else:
        step, names = 1, ("m", "s", 60)
    large, small = divmod(round(seconds / step), names[2])
    return "".join(f"{count}{name}" for count, name in ((large, names[0]), (small, names[1])) if count)


def format_size(size: float) -> str:
    """``512 B``, ``1.4 GiB``, ``200 GiB``: powers of 1024, at most one digit after the point."""
    if size < 0:
        return f"-{format_size(-size)}"
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(value, 1) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
