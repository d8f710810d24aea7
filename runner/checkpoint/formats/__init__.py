"""Whose checkpoint is this, is it complete, which step is it, and how is it resumed?

Nothing is ever unpickled. One small class for each format answers, from names and structure alone: a torch file is a
zip whose directory comes last, a safetensors file says its own length, a trainer's folder is complete when the file
that the trainer writes last is there, and with it all that it names.
"""

from runner.checkpoint.formats.entry import Pointer, Proof, Verdict, walk
from runner.checkpoint.formats.names import is_never, looks_like_checkpoint, step_of
from runner.checkpoint.formats.table import FORMATS, judge, may_be_checkpoint, pointer_to

__all__ = [
    "FORMATS",
    "Pointer",
    "Proof",
    "Verdict",
    "is_never",
    "judge",
    "looks_like_checkpoint",
    "may_be_checkpoint",
    "pointer_to",
    "step_of",
    "walk",
]
