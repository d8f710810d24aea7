"""What still fits before a deadline."""

from __future__ import annotations

LEAST_RESERVE = 5.0
SLACK = 1.2
LARGEST_SHARE = 0.6


def seconds_to_save(remaining: float, upload_seconds: float) -> float:
    """How long the trainer may take to save and leave, out of ``remaining`` seconds until the machine goes.

    The rest is kept for the upload: what the last one took and a fifth more, at least 5 s, at most 60 %.
    """
    remaining = max(remaining, 0.0)
    reserve = min(max(LEAST_RESERVE, upload_seconds * SLACK), remaining * LARGEST_SHARE)
    return remaining - reserve
