"""The random states that the next step depends on, as tensors and numbers.

Python, numpy and torch on the CPU always; CUDA and other accelerators once they are in use. Put them back last: making
a data loader's iterator draws from torch's.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from runner.training.optional import np

_ACCELERATORS = ("cuda", "npu", "xpu")


def capture() -> dict[str, Any]:
    """The states of all global generators of this process, as plain values, tensors and arrays."""
    state = capture_host()
    for name, module in _accelerators():
        if module.is_initialized():  # an untouched one has no state yet worth a context on its device
            state[name] = module.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what :func:`capture` gave. Devices that this machine does not have are left out."""
    restore_host(state)
    for name, module in _accelerators():
        saved = state.get(name, [])
        for device, one in enumerate(saved[: module.device_count()]):
            module.set_rng_state(_own(one), device)


def capture_host() -> dict[str, Any]:
    """The states of Python, numpy and torch on the CPU only: some ten microseconds."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, torch.tensor(words), gauss), "torch": torch.get_rng_state()}
    if np is not None:
        state["numpy"] = np.random.get_state(legacy=False)
    return state


def restore_host(state: dict[str, Any]) -> None:
    """Put back what :func:`capture_host` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(_own(state["torch"]))
    if np is not None and "numpy" in state:
        np.random.set_state(state["numpy"])


def _accelerators() -> list[tuple[str, Any]]:
    modules = [(name, getattr(torch, name, None)) for name in _ACCELERATORS]
    return [(name, module) for name, module in modules if module is not None and module.is_available()]


def _own(state: Tensor) -> Tensor:
    """set_rng_state wants memory of its own, not a view into a file."""
    return state.detach().cpu().clone()
