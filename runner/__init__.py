"""cloudrun: runs a training command on machines that can vanish, and finishes it anyway."""

__version__ = "0.1.0"
