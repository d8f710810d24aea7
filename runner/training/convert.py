"""One file that plain ``torch.load(file, weights_only=True)`` reads, from a checkpoint folder.

    python -m runner.training.convert checkpoints/step-000000000120 model.pt

The file holds ``{"step": ..., "metrics": ..., "state": {"model": ..., "optimizer": ...}}``. Sharded tensors come whole.
What weights_only refuses becomes its plain counterpart: numpy scalars are numbers, numpy arrays are tensors, queues are
lists. Random states and positions of loaders are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import torch

from runner.training import sharded
from runner.training.folder import check, tensors_name
from runner.training.image import DamagedCheckpoint, load_image
from runner.training.optional import np
from runner.training.state import Copies, unpack


def converted(folder: Path) -> dict[str, Any]:
    """What ``torch.save`` is given. Raises DamagedCheckpoint when the folder is not whole."""
    meta = check(folder)
    tensors = load_image(folder / tensors_name(0))
    if meta["sharded"]:
        tensors |= sharded.load_whole(folder)
    return {"step": meta["step"], "metrics": meta["metrics"], "state": _plain(unpack(meta["state"], Copies(tensors)))}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, defaultdict, Counter):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if kind is OrderedDict:
        for key, item in value.items():
            value[key] = _plain(item)
        return value
    if kind in (list, deque):
        return [_plain(item) for item in value]
    if kind in (tuple, set, frozenset):
        made = [_plain(item) for item in value]
        return tuple(made) if kind is tuple else set(made)
    if np is not None and isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value.item() if np is not None and isinstance(value, np.generic) else value


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.training.convert", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="a checkpoint: .../step-000000000120")
    parser.add_argument("file", type=Path, help="the file to write, such as model.pt")
    options = parser.parse_args()
    try:
        torch.save(converted(options.folder), options.file)
    except (DamagedCheckpoint, OSError) as error:
        sys.exit(f"error: {error}\nhint: name a folder that runner.training saved, and a file that can be written")


if __name__ == "__main__":
    main()
