"""The folders below one in which logs of runs may lie."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.files import MAX_FOLDER_ENTRIES, identity_of, is_folder, list_folder
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import ErrorNote, Skipped

_USUAL = (
    ("", "checkpoint-*"),
    ("", "version_*"),
    ("lightning_logs", "version_*"),
    ("runs", "*"),
    ("logs", "*"),
    ("", "offline-run-*"),
    ("", "run-*"),
    ("wandb", "*run-*"),
    ("ampdoctor-health", "*"),
    ("", "*"),
    ("", "*/version_*"),  # Lightning's loggers that have a name
    ("", "*/vis_data"),  # mmengine's
    ("", "*/*"),
    ("runs", "*/*"),  # Ultralytics' runs/detect/train
)
"""Where runs keep their logs: the folder, and the names in it, of which the latest comes first."""
_LEVELS = 6
"""How deep folders are looked into: Hydra's `outputs/DATE/TIME/lightning_logs/name/version_0`."""
_MOST = 1000
"""Folders that are looked into; a data set has more."""
_NO_RUNS = frozenset({"calls.safetensors", "pyvenv.cfg"})
"""What lies in a step that `ampdoctor run` has recorded, and in a virtual environment."""


@dataclass(slots=True)
class Places:
    """The folders below one.

    Attributes:
        folders: They, those first in which runs usually keep their logs.
        skipped: What was not looked into, and why.
        errors: The folders that cannot be listed.
    """

    folders: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)


def places_below(root: Path) -> Places:
    """Returns the folders below one; a folder to which two ways lead is one of them once.

    Hidden folders are another tool's, as a virtual environment's are, and are not looked into.

    Raises:
        CheckpointError: The folder itself cannot be listed.
    """
    places, seen = Places(), {identity_of(root)}
    waiting = deque([("", list_folder(root), _LEVELS)])
    while waiting:  # level by level, so that a deep folder takes no room from those beside it
        prefix, listing, levels = waiting.popleft()
        for name in listing.names:
            path = listing.path / name
            if name not in listing.folders or name.startswith((".", "__")) or (one := identity_of(path)) in seen:
                continue
            if not levels or len(places.folders) == _MOST:
                why = "they lie too deep" if not levels else f"{_MOST:,} others come before them"
                places.skipped.append(Skipped(what=f"folders in {prefix or '.'}", reason=f"not looked into: {why}"))
                break
            seen.add(one)
            try:
                below = list_folder(path)
            except LimitExceededError:
                reason = f"not looked into: more than {MAX_FOLDER_ENTRIES:,} files are no run's"
                places.skipped.append(Skipped(what=f"{prefix}{name}", reason=reason))
                continue
            except CheckpointError as error:
                places.errors.append(ErrorNote(what=f"{prefix}{name}", kind="unreadable", message=str(error)))
                continue
            if _NO_RUNS.isdisjoint(below.names):
                places.folders.append(path)
                waiting.append((f"{prefix}{name}/", below, levels - 1))
    ranks: dict[Path, int] = {}
    for path in _usual(root):
        ranks.setdefault(path, len(ranks))
    places.folders.sort(key=lambda path: ranks.get(path, len(ranks)))
    return places


def _usual(folder: Path) -> Iterator[Path]:
    for inner, pattern in _USUAL:
        try:
            runs = [path for path in (folder / inner).glob(pattern) if is_folder(path) and not path.is_symlink()]
        except OSError:
            continue
        yield from sorted(runs, key=last_written, reverse=True)


def last_written(folder: Path) -> tuple[int, str]:
    """Returns the last change of what lies in a folder, in nanoseconds, and its name, which decides of equal ones."""
    try:
        times = [entry.stat().st_mtime_ns for entry in os.scandir(folder) if entry.is_file()]
    except OSError:
        times = []
    return max(times, default=0), folder.name
