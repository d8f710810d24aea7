"""Checkpoints: recognised on the disk, committed to the store, verified on the way back."""
