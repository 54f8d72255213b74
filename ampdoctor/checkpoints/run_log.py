"""The training log of a run: it lies beside the checkpoints, or beside the folder that holds them and was not named.

Nothing above the folder that was named is looked at, whatever it is called: what lies there nobody gave to be read.
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
    """The longest of the logs of a run, as for a single checkpoint, and those that could not be read.

    Args:
        path: What `members` was given.
        family: What it found there; at least one.

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
    """The last loss that was logged up to a step, and after an earlier one; None where there is none."""
    for entry in reversed(log[: bisect.bisect_right(log, step, key=lambda e: e.step)]):
        if entry.step <= after:
            return None
        if entry.loss is not None:
            return entry.loss
    return None


def _home(root: Path, member: Member) -> Path:
    """The folder in which the checkpoints of a family lie."""
    return root / Path(member.name).parent if "/" in member.name else root
