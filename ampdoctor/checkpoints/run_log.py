"""A run's training log, which is beside the checkpoints, or in the named folder above the checkpoints' own.

Nothing above the named folder is read, whatever it is called: nobody asked for it.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path

from ampdoctor.checkpoints.family import Member, listed
from ampdoctor.checkpoints.layouts.folder_logs import longest_log
from ampdoctor.evidence.of_checkpoints.checkpoint import LogEntry
from ampdoctor.evidence.report import Skipped

RunLog = tuple[LogEntry, ...]


def run_log(path: str | os.PathLike[str], family: Sequence[Member]) -> tuple[RunLog, tuple[Skipped, ...]]:
    """Returns the longest of a run's logs, as for a single checkpoint, and the logs that could not be read.

    Args:
        path: The argument of `members`.
        family: The result of `members`; at least one.

    Raises:
        CheckpointError: A folder can no longer be listed.
    """
    root = Path(path).absolute()
    longest: RunLog = ()
    skipped: list[Skipped] = []
    for folder in dict.fromkeys((_home(root, family[0]), root)):
        prefix = os.path.relpath(folder, root)
        names = [name for name, _ in listed(folder)]
        log, unread = longest_log(folder, names, "" if prefix == "." else f"{prefix}/")
        longest = max(longest, log, key=len)
        skipped += unread
    return longest, tuple(skipped)


def loss_until(log: RunLog, step: int, after: int = -1) -> float | None:
    """Returns the last loss logged up to a step, and after an earlier step; None if there is none."""
    for entry in reversed(log[: bisect.bisect_right(log, step, key=lambda e: e.step)]):
        if entry.step <= after:
            return None
        if entry.loss is not None:
            return entry.loss
    return None


def _home(root: Path, member: Member) -> Path:
    """Returns the folder of a family's checkpoints."""
    return root / Path(member.name).parent if "/" in member.name else root
