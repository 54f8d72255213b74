"""Opens the single checkpoint that a command examines; a folder of many is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ampdoctor.checkpoints import Checkpoint, open_checkpoint
from ampdoctor.checkpoints.family import Member, members
from ampdoctor.checkpoints.run_log import run_log
from ampdoctor.errors import CheckpointError


def open_one(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a single checkpoint's structure.

    Args:
        path: As for `open_checkpoint`, or a run's folder with one checkpoint in it.

    Raises:
        CheckpointError: It cannot be read, or the folder holds several; the sentence names the last of them.
    """
    family = members(path)
    if family is None or len(family) == 1:
        return open_only(path, family)
    last = [member for member in family if member.placed and not member.files][-1:] or family[-1:]
    name = Path(path).name or str(path)
    raise CheckpointError(f"{name} holds {len(family)} checkpoints; name one of them, for example {last[0].name}.")


def open_only(path: str | os.PathLike[str], family: Sequence[Member] | None) -> Checkpoint:
    """Read a single checkpoint's structure, and the log of its run.

    Args:
        path: The argument of `members`.
        family: The result of `members`: None, or one member.

    Raises:
        CheckpointError: It cannot be read.
    """
    if family is None:
        return open_checkpoint(path)
    log, unread = run_log(path, family)
    checkpoint = family[0].open()
    checkpoint.take_log(log, unread)
    return checkpoint
