"""Opens any checkpoint inertly and streams its tensors.

Nothing in a checkpoint is ever executed. Memory is bounded whatever a file claims, and a file that lies about itself
gives an error, never a number.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOME = {
    "Checkpoint": "ampdoctor.checkpoints.contents.checkpoint",
    "CheckpointFile": "ampdoctor.checkpoints.contents.checkpoint",
    "LoadedCheckpoint": "ampdoctor.checkpoints.load",
    "TensorRef": "ampdoctor.checkpoints.contents.checkpoint",
    "clean_names": "ampdoctor.checkpoints.contents.structure",
    "load_state": "ampdoctor.checkpoints.load",
    "open_checkpoint": "ampdoctor.checkpoints.opening",
}


def __getattr__(name: str) -> Any:
    """Loads a name on first use: whoever reads a run's log needs files of this room, and no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'ampdoctor.checkpoints' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
