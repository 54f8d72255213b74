"""A run's training log, which is beside the checkpoints, or in the named folder above the checkpoints' own.

Nothing above the named folder is read, whatever it is called: nobody asked for it.
"""

from __future__ import annotations

import bisect

from ampdoctor.checkpoints.family import Family
from ampdoctor.checkpoints.layouts.folder_logs import longest_log
from ampdoctor.checkpoints.storage.listing import Listing
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.report import Skipped

RunLog = tuple[LogEntry, ...]


def run_log(root: Listing, family: Family) -> tuple[RunLog, tuple[Skipped, ...]]:
    """Returns the longest of a run's logs, as for a single checkpoint, and the logs that could not be read.

    Args:
        root: The folder that was named.
        family: The checkpoints in it, or in a folder in it.
    """
    longest: RunLog = ()
    skipped: list[Skipped] = []
    for folder in (family.home, root) if family.home is not root else (root,):
        prefix = "" if folder is root else f"{folder.path.name}/"
        log, unread = longest_log(folder.path, folder.names, prefix)
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
