"""Where torch has no GPU, the usual torchvision lacks its operators and does not import: they are declared first.

Python imports this by itself when the folder is on PYTHONPATH. It stands in for a site customisation of a user's own.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MADE_FOR_TENSORS = ("nms", "qnms")
_OTHERS = (
    "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "qroi_align", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
_libraries: list[Any] = []


class Declares(MetaPathFinder):
    """Declares the operators just before torchvision's own code runs."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torchvision" or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        if (loader := spec.loader) is not None:
            execute = loader.exec_module

            def execute_with_operators(module: ModuleType) -> None:
                declare()
                execute(module)
                module.extension._has_ops = lambda: True

            loader.exec_module = execute_with_operators  # type: ignore[method-assign]
        return spec


def declare() -> None:
    import torch

    if torch.version.cuda is not None or _libraries:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _MADE_FOR_TENSORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in _OTHERS:
        library.define(f"{name}() -> ()")
    library.impl("nms", non_maximum_suppression, "CPU")
    _libraries.append(library)


def non_maximum_suppression(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Indices of the boxes that stay, best first."""
    order, kept = scores.argsort(descending=True), []
    while len(order):
        best, order = order[:1], order[1:]
        kept.append(best)
        order = order[overlap(boxes[best], boxes[order]) <= iou_threshold]
    return kept[0].new_tensor([int(one) for one in kept]) if kept else scores.argsort()


def overlap(one: Any, others: Any) -> Any:
    """Shared area over united area of one box (1 x 4) with each other (n x 4)."""
    corner = one[:, :2].maximum(others[:, :2])
    shared = (one[:, 2:].minimum(others[:, 2:]) - corner).clamp(min=0).prod(1)
    return shared / ((one[:, 2:] - one[:, :2]).prod(1) + (others[:, 2:] - others[:, :2]).prod(1) - shared)


sys.meta_path.insert(0, Declares())
