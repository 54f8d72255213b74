"""Names of files in a report: the same for one path, for several, and for a folder above."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns a path for a report's reader: relative to the working directory if it lies below it, else absolute."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # somebody has removed it
        return Path(os.path.normpath(path)).as_posix()
    absolute = Path(os.path.normpath(Path(path).absolute()))  # a link is shown under its own name
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else absolute).as_posix()


def scanned_path(target: Mapping[str, Any]) -> str | None:
    """Returns the scanned checkpoint of a report's target; None for several: a finding's file says which one."""
    path = None if "paths" in target else target.get("location") or target.get("path")
    return None if path is None else posix(path)


def checkpoint_path(target: Mapping[str, Any]) -> str:
    """Returns the checkpoint that was scanned, or that a run was resumed from; "" if there is none, or if many are."""
    return scanned_path(target) or posix(target.get("checkpoint") or "")


def file_within(checkpoint: str, file: str) -> str:
    """Returns a checkpoint file's path: a checkpoint of one file is that file, and an index lies beside its files.

    Args:
        checkpoint: Its path; "" if there is none, so that the file's own name is complete.
        file: Its name inside the checkpoint, as in findings.
    """
    if not checkpoint or checkpoint == file or checkpoint.endswith(f"/{file}"):
        return checkpoint or file
    folder = checkpoint.rpartition("/")[0] if checkpoint.endswith(".json") else checkpoint
    return posix(f"{folder}/{file}" if folder else file)


def path_in_repository(path: str, target: Mapping[str, Any]) -> str:
    """Returns the path from the repository's root, if the report says where that is and the path lies below it.

    Args:
        path: From the working directory, or absolute.
        target: The report's target; without a `repository`, the working directory counts as the root.
    """
    known = target.get("repository")
    if known is None:
        return path
    root = PurePath(known["root"])
    whole = PurePath(os.path.normpath(root / known["folder"] / path))
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else path


def posix(path: str) -> str:
    """Returns the path with `/`, without `./` and a final `/`."""
    return PurePath(path).as_posix() if path else ""
