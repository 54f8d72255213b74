"""Opens any checkpoint inertly and streams its tensors.

Nothing in a checkpoint is ever executed. Memory is bounded whatever a file claims; a file that contradicts itself is
refused with an error.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampdoctor.checkpoints.checkpoint import Checkpoint, CheckpointFile, TensorRef
    from ampdoctor.checkpoints.file_contents import clean_names
    from ampdoctor.checkpoints.folder import open_checkpoint
    from ampdoctor.checkpoints.resume_state import LoadedCheckpoint, load_state

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
    "Checkpoint": "ampdoctor.checkpoints.checkpoint",
    "CheckpointFile": "ampdoctor.checkpoints.checkpoint",
    "LoadedCheckpoint": "ampdoctor.checkpoints.resume_state",
    "TensorRef": "ampdoctor.checkpoints.checkpoint",
    "clean_names": "ampdoctor.checkpoints.file_contents",
    "load_state": "ampdoctor.checkpoints.resume_state",
    "open_checkpoint": "ampdoctor.checkpoints.folder",
}


def __getattr__(name: str) -> Any:
    """Loads a name on first use: reading a run's log needs files of this package, and no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'ampdoctor.checkpoints' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
