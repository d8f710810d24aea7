"""Hands the checkpoint to go on from to Transformers and Lightning trainers whose scripts take no such argument.

Python imports this module by itself when this folder comes first on PYTHONPATH, which it does for a job with
``checkpoints.inject``. It belongs to the trainer's process: standard library only, nothing of runner, any Python 3.8,
and whatever goes wrong here is said once on stderr while the script goes on as if this file were not there.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

VARIABLE = "CLOUDRUN_RESUME_FROM"
# Module -> method of its Trainer, and the parameter that takes a checkpoint.
METHODS: dict[str, tuple[str, str]] = {
    "transformers.trainer": ("train", "resume_from_checkpoint"),
    "lightning.pytorch.trainer.trainer": ("fit", "ckpt_path"),
    "pytorch_lightning.trainer.trainer": ("fit", "ckpt_path"),
}
_called: list[str] = []


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"cloudrun: {text}", file=sys.stderr, flush=True)  # noqa: T201 (the trainer's own output)


class Finder(MetaPathFinder):
    """Lets the other finders find, and changes the trainer right after its module has run."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in METHODS:
            return None
        others = (one for one in sys.meta_path if one is not self and hasattr(one, "find_spec"))
        spec = next(filter(None, (one.find_spec(fullname, path, target) for one in others)), None)
        if spec is not None and spec.loader is not None:
            self.change_after(spec.loader, fullname)
        return spec

    def change_after(self, loader: Any, fullname: str) -> None:
        execute = loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            try:
                change(module.Trainer, *METHODS[fullname])
            except Exception as error:  # noqa: BLE001 (the edge to a script of somebody else: it must go on)
                say(f"checkpoints.inject does not work with this {fullname}: {error!r}")

        loader.exec_module = execute_and_change


def change(trainer: Any, method: str, parameter: str) -> None:
    """Make the first call of the method take our checkpoint, unless the script names one itself."""
    # Late, for every Python process of the job imports this file.
    import functools  # noqa: PLC0415
    import inspect  # noqa: PLC0415

    original = getattr(trainer, method)
    signature = inspect.signature(original)
    if parameter not in signature.parameters:
        raise TypeError(f"{method} takes no {parameter}")

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.environ.get(VARIABLE) if not _called else None
        _called.append(method)
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            # The original says better what is wrong with the call.
            return original(self, *args, **kwargs)
        if path and is_undecided(bound.arguments.get(parameter)):
            say(f"{trainer.__name__}.{method} goes on from {path}")
            bound.arguments[parameter] = path
        return original(*bound.args, **bound.kwargs)

    setattr(trainer, method, wrapped)


def is_undecided(value: object) -> bool:
    """True for what leaves the choice to the trainer, which would take the newest name or time, whole or not."""
    return value is None or value is True or (isinstance(value, str) and value == "last")


def run_users_own() -> None:
    """The site customisation that would have run without us; its errors are Python's to tell."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.abspath(one) != here])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, Finder())
run_users_own()
