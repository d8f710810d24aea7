"""A checkpoint on the disk: its names, whether it is whole, which is the newest.

    step-000000000012/state.json             rank 0: step, metrics, environment, the tree of the state; written last
    step-000000000012/state.safetensors      rank 0: its tensors
    step-000000000012/rank-00001.json        another rank: what only it has (random states, positions of loaders)
    step-000000000012/rank-00001.safetensors

``state.json`` lists all other files with their sizes. A folder gets its name when it is complete, never before.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from runner.training.image import DamagedCheckpoint

FORMAT = "cloudrun-training"
VERSION = 1
META = "state.json"
_NAME = re.compile(r"step-(\d{12,})")


def folder_name(step: int) -> str:
    """The final name of the checkpoint of a step."""
    return f"step-{step:012d}"


def tensors_name(rank: int) -> str:
    """The safetensors file of a rank."""
    return f"rank-{rank:05d}.safetensors" if rank else "state.safetensors"


def meta_name(rank: int) -> str:
    """The JSON file of a rank."""
    return f"rank-{rank:05d}.json" if rank else META


def read_meta(folder: Path, rank: int) -> dict[str, Any] | None:
    """What a rank wrote beside its tensors; None when that rank did not take part.

    Raises DamagedCheckpoint when it cannot be read, or is of another format.
    """
    path = folder / meta_name(rank)
    try:
        meta = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if rank:
            return None
        raise DamagedCheckpoint(f"{folder} has no {META}: it was not saved by runner.training") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is not JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} is not of format {FORMAT}")
    if meta.get("version") != VERSION:
        raise DamagedCheckpoint(f"{path} is of version {meta.get('version')}, this library reads {VERSION}")
    return meta


def check(folder: Path) -> dict[str, Any]:
    """Rank 0's meta of a whole checkpoint. Raises DamagedCheckpoint when a file is missing or has another size."""
    meta = read_meta(folder, 0)
    files = meta.get("files") if meta is not None else None
    if meta is None or not isinstance(files, dict):
        raise DamagedCheckpoint(f"{folder / META} does not list the files")
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise DamagedCheckpoint(f"{path} is missing or has not the {size} bytes that {META} tells")
    return meta


def saved_in(parent: Path) -> list[Path]:
    """The checkpoints in a folder by name alone, oldest step first."""
    named = [path for path in parent.glob("step-*") if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(named, key=step_of)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name. Raises DamagedCheckpoint for a name of another kind."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise DamagedCheckpoint(f"{folder} is not named like a checkpoint of runner.training")
    return int(match[1])
