"""Opens any checkpoint inertly and streams its tensors.

Nothing in a checkpoint is ever executed. Memory is bounded whatever a file claims, and a file that lies about itself
gives an error, never a number.
"""

from __future__ import annotations

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint, CheckpointFile, TensorRef
from ampdoctor.checkpoints.contents.structure import clean_names
from ampdoctor.checkpoints.load import LoadedCheckpoint, load_state
from ampdoctor.checkpoints.opening import open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "LoadedCheckpoint",
    "TensorRef",
    "clean_names",
    "load_state",
    "open_checkpoint",
]
