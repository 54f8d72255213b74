"""The training log of a run with many checkpoints: it lies beside them, or beside the folder that holds them."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path

from ampdoctor.checkpoints.family import Member, listed
from ampdoctor.checkpoints.layouts.folder_logs import longest_log
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint import LogEntry
from ampdoctor.evidence.report import Skipped

_FOLDER_OF_CHECKPOINTS = frozenset({"checkpoints", "checkpoint", "ckpts", "ckpt"})
"""Names of folders in which a trainer keeps nothing but checkpoints: its log lies one level higher."""

RunLog = tuple[LogEntry, ...]


def run_log(path: str | os.PathLike[str], family: Sequence[Member]) -> tuple[RunLog, tuple[Skipped, ...]]:
    """The longest of the logs of a run, as for a single checkpoint, and those that could not be read.

    Args:
        path: What `members` was given.
        family: What it found there; at least one.
    """
    root = Path(path).absolute()
    home = _home(root, family[0])
    folders = [home]
    if home != root:
        folders.append(root)
    elif home.name.lower() in _FOLDER_OF_CHECKPOINTS:
        folders.append(home.parent)
    longest: RunLog = ()
    skipped: list[Skipped] = []
    for folder in folders:
        prefix = os.path.relpath(folder, root)
        log, unread = longest_log(folder, _names(folder), "" if prefix == "." else f"{prefix}/")
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


def _names(folder: Path) -> list[str]:
    try:
        return [name for name, _ in listed(folder)]
    except CheckpointError:
        return []  # the folder above the one that was named: nobody asked for it
