"""A folder, listed once: what lies in it is handed down, and not asked again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.errors import CheckpointError, LimitExceededError

MAX_FOLDER_ENTRIES = 20_000
"""A checkpoint folder holds hundreds of files; a data set's folder given by mistake holds millions."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a folder.

    Attributes:
        path: The folder.
        names: What lies in it, sorted.
        folders: Those that are folders, or links to one.
    """

    path: Path
    names: tuple[str, ...]
    folders: frozenset[str]

    @property
    def files(self) -> list[str]:
        """What lies in it and is no folder."""
        return [name for name in self.names if name not in self.folders]

    def only(self, names: Iterable[str]) -> Listing:
        """The same folder with some of its names, in the order in which they are given."""
        kept = tuple(names)
        return Listing(self.path, kept, self.folders.intersection(kept))


def list_folder(folder: Path) -> Listing:
    """List a folder.

    Raises:
        CheckpointError: It cannot be listed.
        LimitExceededError: It holds more than `MAX_FOLDER_ENTRIES` entries.
    """
    there: dict[str, bool] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                there[entry.name] = _leads_to_folder(entry)
                if len(there) > MAX_FOLDER_ENTRIES:
                    raise LimitExceededError(f"{folder.name}: files in the folder", MAX_FOLDER_ENTRIES, len(there))
    except OSError as error:
        raise CheckpointError(f"{folder.name} cannot be listed: {(error.strerror or str(error)).lower()}.") from None
    return Listing(folder, tuple(sorted(there)), frozenset(name for name, inner in there.items() if inner))


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; a link to itself is neither, and opening it says so."""
    try:
        return entry.is_dir()
    except OSError:
        return False
