"""What a command that looks at a single checkpoint says to a folder of many."""

from __future__ import annotations

import os
from pathlib import Path

from ampdoctor.checkpoints.family import members
from ampdoctor.errors import CheckpointError


def refuse_many(path: str | os.PathLike[str]) -> None:
    """Refuse a folder of many checkpoints.

    Raises:
        CheckpointError: It is one; the sentence names the last of them.
    """
    family = members(path)
    if family is not None:
        last = [member for member in family if not member.files][-1:] or family[-1:]
        name = Path(path).name or str(path)
        raise CheckpointError(
            f"{name} holds {len(family)} checkpoints; name one of them, for example {Path(path) / last[0].name}."
        )
