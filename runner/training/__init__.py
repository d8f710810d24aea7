"""The optional library of a training script: saves that cost one memory copy, and a resume that is exact.

It imports torch and its own files, nothing else of cloudrun, and works without a supervisor too.
"""

from runner.training.checkpointer import Checkpointer, Destination
from runner.training.digest import state_digest
from runner.training.image import DamagedCheckpoint
from runner.training.sampling import ResumableSampler, SeededDataset, seed_sample
from runner.training.snapshot import Mismatch
from runner.training.state import NotStorable

__all__ = [
    "Checkpointer",
    "DamagedCheckpoint",
    "Destination",
    "Mismatch",
    "NotStorable",
    "ResumableSampler",
    "SeededDataset",
    "seed_sample",
    "state_digest",
]
