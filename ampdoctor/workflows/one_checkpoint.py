"""Opening the checkpoint that a command looks at, where a folder of many will not do."""

from __future__ import annotations

import os
from pathlib import Path

from ampdoctor.checkpoints import Checkpoint, open_checkpoint
from ampdoctor.checkpoints.family import members
from ampdoctor.errors import CheckpointError


def open_one(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a single checkpoint's structure.

    Args:
        path: As for `open_checkpoint`, or a run's folder with one checkpoint in it.

    Raises:
        CheckpointError: It cannot be read, or the folder holds several; the sentence names the last of them.
    """
    family = members(path)
    if family is None:
        return open_checkpoint(path)
    if len(family) == 1:
        return family[0].open()
    last = [member for member in family if member.placed and not member.files][-1:] or family[-1:]
    name = Path(path).name or str(path)
    raise CheckpointError(f"{name} holds {len(family)} checkpoints; name one of them, for example {last[0].name}.")
