"""The entry point: opens the checkpoint at a path."""

from __future__ import annotations

import os
from pathlib import Path

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.layouts.folder import open_file, open_folder
from ampdoctor.checkpoints.storage.files import is_folder
from ampdoctor.checkpoints.storage.listing import list_folder


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint's structure; the result holds files open, so use it as a context manager.

    Args:
        path: A `.safetensors` file, an index of shards, a file of `torch.save`, or a folder of these or of
            `torch.distributed.checkpoint`. The contents decide the format.

    Raises:
        CheckpointError: It does not exist, is refused, or nothing in it can be read; one sentence says why.
        LimitExceededError: It asks for more than a safe bound.
    """
    target = Path(path)
    return open_folder(list_folder(target)) if is_folder(target) else open_file(target)
