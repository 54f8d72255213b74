"""The repository that the working directory lies in.

A report's paths are from the working directory. GitHub takes those of annotations and of code scanning from the
repository's root, so that a report made below it says where it was made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def repository_root(folder: Path) -> Path | None:
    """The nearest folder, this one or above it, with `.git`: a folder, or the file of a worktree or submodule."""
    return next((level for level in (folder, *folder.parents) if os.path.exists(level / ".git")), None)  # noqa: PTH110 - never raises


def place_in_repository() -> dict[str, Any]:
    """What a report's target says of the working directory: nothing where it is the root, or in no repository.

    In a job of GitHub Actions the root is the workspace, which need not be a clone.
    """
    try:
        here = Path.cwd()
    except OSError:  # somebody has deleted it
        return {}
    root = next((root for root in _roots(here) if here.is_relative_to(root)), here)
    if root == here:
        return {}
    return {"repository": {"root": root.as_posix(), "folder": here.relative_to(root).as_posix()}}


def _roots(here: Path) -> Iterator[Path]:
    """Yield what may be the root, the likeliest first; without links, as the working directory is."""
    workspace = Path(os.environ.get("GITHUB_WORKSPACE", ""))
    if workspace.is_absolute():
        yield Path(os.path.realpath(workspace))
    nearest = repository_root(here)
    if nearest is not None:
        yield nearest
