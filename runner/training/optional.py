"""What may be absent from a user's installation, or not in use."""

from __future__ import annotations

import sys
from typing import Any

np: Any

try:
    import numpy as np
except ImportError:  # torch runs without it
    np = None

__all__ = ["is_dtensor", "np"]


def is_dtensor(value: object) -> bool:
    """True for a tensor of which each rank holds a part.

    Whoever has one has imported its module: we need not, which saves half a second at each start.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
