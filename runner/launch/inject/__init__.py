"""The folder that goes first on a trainer's PYTHONPATH when its spec says ``checkpoints.inject``."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def with_hook(python_path: str) -> str:
    """A PYTHONPATH on which the hook comes first. An empty part would mean the working directory."""
    return os.pathsep.join(filter(None, (str(FOLDER), python_path)))
