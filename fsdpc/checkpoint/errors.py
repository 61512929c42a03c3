"""The exception that saves and loads of checkpoints raise."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded, or is damaged. The message names the rank, the
    file or tensor, and the cause. Raised on every rank that takes part.
    """
