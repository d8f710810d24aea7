"""What a name alone tells: the step, and whether it may be a checkpoint at all."""

from __future__ import annotations

import re

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pth.tar")
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
TEMPORARY = (".tmp", ".part", ".partial")

# Rows are tried from the top; the last match inside a name counts. Steps come before counters that may be steps,
# and those before epochs.
_STEP_RULES = tuple(
    re.compile(rule, re.IGNORECASE)
    for rule in (
        r"(?<![a-z])global[-_]?step[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])steps?[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:iteration|iter|itr)[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:batch|ba|updates?)[-_=]?(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:checkpoint|ckpt|chkpt)[-_=]\d+_(\d{1,15})(?![0-9a-z])",
        r"(?<![a-z])(?:checkpoint|ckpt|chkpt|model|state|weights|snapshot|save)[-_=](\d{1,15})(?![0-9a-z]|-of-\d)",
        r"(?<![a-z])(?:epoch|ep)[-_=]?(\d{1,15})(?![0-9a-z])",
        r"^(?:checkpoint|ckpt)(\d{1,15})(?![0-9a-z])",
        r"^(\d{1,15})(?=\.(?:pt|pth|ckpt|bin|safetensors|pth\.tar)$)",
    )
)


def step_of(name: str) -> int | None:
    """The training step that a name tells, or None. An epoch counts where a name tells no step."""
    for rule in _STEP_RULES:
        found = rule.findall(name)
        if found:
            return int(found[-1])
    return None


def is_never(name: str) -> bool:
    """True for names that are never checkpoints: hidden or temporary."""
    return name.startswith((".", "tmp")) or name.endswith(TEMPORARY)


def looks_like_checkpoint(name: str, *, is_dir: bool) -> bool:
    """What a name alone suggests."""
    if is_never(name):
        return False
    return (not is_dir and name.lower().endswith(SUFFIXES)) or step_of(name) is not None
