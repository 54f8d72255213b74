"""A folder that is listed once; its names are passed on and not read again."""

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
    """The names in a folder.

    Attributes:
        path: The folder.
        names: All names in it, sorted.
        folders: The names of folders, and of links to folders.
    """

    path: Path
    names: tuple[str, ...]
    folders: frozenset[str]

    @property
    def files(self) -> list[str]:
        """The names in it that are not folders."""
        return [name for name in self.names if name not in self.folders]

    def only(self, names: Iterable[str]) -> Listing:
        """Returns the same folder with some of its names, in the given order."""
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
    """Is it a folder or a link to one? A link to itself is neither; opening it gives an error."""
    try:
        return entry.is_dir()
    except OSError:
        return False
