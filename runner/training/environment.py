"""What the bits of a result depend on beside the saved state: recorded with each checkpoint, compared at a resume."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

# What a person reads when a recorded value differs; the rest is recorded only.
_WORDS = {
    "torch": "the version of torch",
    "threads": "the number of threads",
    "cpu": "the instruction set of the CPU",
    "device": "the accelerator",
    "cuda": "the version of CUDA",
    "cudnn": "the version of cuDNN",
    "deterministic": "torch.use_deterministic_algorithms",
    "matmul": "the precision of matrix products",
    "world": "the number of ranks",
}


def record(world: int) -> dict[str, str]:
    """The present environment of this process, as short strings."""
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if cuda else "",
        "cuda": str(torch.version.cuda or ""),
        "cudnn": str(_cudnn() or "") if cuda else "",
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "world": str(world),
    }


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each thing that bits depend on and that is not as it was, in words."""
    return [
        f"{words} was {before[name] or 'none'}, is {now[name] or 'none'}"
        for name, words in _WORDS.items()
        if name in before and name in now and before[name] != now[name]
    ]


def doubts(now: Mapping[str, str]) -> list[str]:
    """What makes even an unchanged machine give other bits."""
    if not now["device"]:
        return []
    said = []
    if now["deterministic"] == "False":
        said.append("CUDA repeats its bits only after torch.use_deterministic_algorithms(True)")
    if now["cudnn_benchmark"] == "True":
        said.append("cudnn.benchmark chooses algorithms anew in every process")
    return said


def _cudnn() -> Any:
    return torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
