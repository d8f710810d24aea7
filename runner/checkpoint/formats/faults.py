"""Why something is no complete checkpoint."""

from __future__ import annotations


class BrokenError(Exception):
    """The structure has a fault; the message says which."""


class NoCheckpointError(Exception):
    """Whole, and yet nothing can be resumed from it; the message says why."""
