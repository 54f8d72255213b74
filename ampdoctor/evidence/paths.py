"""The names by which a report speaks of files: the same for one path, for several, for a folder above."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path for the reader of a report: relative to the working directory where it lies below it, else absolute."""
    absolute = Path(os.path.normpath(Path(path).absolute()))  # a link is shown under its own name
    here = Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else absolute).as_posix()


def scanned_path(target: Mapping[str, Any]) -> str | None:
    """The checkpoint that was scanned, of a report's target; None of several, where a finding's file says which one."""
    path = None if "paths" in target else target.get("location") or target.get("path")
    return None if path is None else posix(path)


def checkpoint_path(target: Mapping[str, Any]) -> str:
    """The checkpoint that was scanned, or that a run was resumed from; "" where there is none, or where many are."""
    return scanned_path(target) or posix(target.get("checkpoint") or "")


def file_within(checkpoint: str, file: str) -> str:
    """The path of a checkpoint's file; a checkpoint that is one file is that file, and an index lies beside them.

    Args:
        checkpoint: Its path; "": none, so that the file's own name says all.
        file: Its name inside the checkpoint, as findings have it.
    """
    if not checkpoint or checkpoint == file or checkpoint.endswith(f"/{file}"):
        return checkpoint or file
    folder = checkpoint.rpartition("/")[0] if checkpoint.endswith(".json") else checkpoint
    return posix(f"{folder}/{file}" if folder else file)


def path_in_repository(path: str, target: Mapping[str, Any]) -> str:
    """The path from the repository's root, where the report says where that is and the path leads below it.

    Args:
        path: From the working directory, or absolute.
        target: Of the report; without a `repository` the working directory is taken for the root.
    """
    known = target.get("repository")
    if known is None:
        return path
    root = PurePath(known["root"])
    whole = PurePath(os.path.normpath(root / known["folder"] / path))
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else path


def posix(path: str) -> str:
    """The path with `/`, without `./` and a last `/`."""
    return PurePath(path).as_posix() if path else ""
