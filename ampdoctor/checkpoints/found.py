"""Examines a path: a checkpoint, several, or neither."""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.checkpoint import Checkpoint
from ampdoctor.checkpoints.files import Listing, list_folder
from ampdoctor.checkpoints.folder import open_file, open_folder
from ampdoctor.checkpoints.series import Contents, SavedCheckpoint, Series, contents_of
from ampdoctor.errors import CheckpointError, SeveralRunsError
from ampdoctor.evidence.report import ErrorNote

_LISTED = 8
"""Runs in a folder that an error lists."""


@dataclass(frozen=True, slots=True)
class PathContents:
    """The result of examining a path, kept as it was typed."""

    typed: str
    is_file: bool = False  # a regular file, or a link to one
    listing: Listing | None = None  # None unless the path is a folder
    contents: Contents = field(default_factory=Contents)  # the checkpoints in that folder

    @property
    def several(self) -> tuple[Series, ...]:
        """The runs in the folder, if there are several."""
        return self.contents.several

    @property
    def path(self) -> Path:
        """The path."""
        return Path(self.typed)

    @property
    def name(self) -> str:
        """The path's name in reports."""
        return self.path.name or self.typed

    @property
    def members(self) -> tuple[SavedCheckpoint, ...]:
        """The checkpoints of a run; () if the path is not a folder of them."""
        return self.contents.members

    @property
    def unlisted(self) -> tuple[ErrorNote, ...]:
        """The folders below that cannot be listed: a checkpoint may lie in them."""
        return tuple(
            ErrorNote(what=name, kind="unreadable", message=str(error)) for name, error in self.contents.below.unlisted
        )

    def require_one_run(self) -> None:
        """Raises CheckpointError for a folder with several runs; the error lists them and the paths to use."""
        if len(self.several) < 2:
            return
        told = [str(one) for one in self.several]
        paths = [os.path.join(self.typed, path) for one in self.several for path in one.paths]  # noqa: PTH118 - as typed
        listed = "; ".join(told[:_LISTED]) + (f"; and {len(told) - _LISTED} more" if len(told) > _LISTED else "")
        typed = shlex.join(paths[:_LISTED])
        raise SeveralRunsError(
            f"{self.name} holds {len(told)} runs or checkpoints, and no one series: {listed}. "
            f"Name one of them, or each.",
            typed if len(paths) <= _LISTED else f"{typed} ...",
        )

    @property
    def log_folders(self) -> tuple[tuple[Listing, str], ...]:
        """The folders that may hold the log of the folder's run: nothing above the named one, whatever it is called."""
        home = self.contents.home
        if self.listing is None or home is None:
            return ()
        return ((self.listing, ""),) if home is self.listing else ((home, f"{home.path.name}/"), (self.listing, ""))

    def open(self) -> Checkpoint:
        """Read the structure of the only checkpoint at the path; raises CheckpointError for several."""
        if self.listing is None:
            return open_file(self.path)
        self.require_one_run()
        if not self.members:
            return open_folder(self.listing, below=True)
        several = self.members
        if len(several) > 1:
            last = [member for member in several if member.placed and not member.files][-1:] or several[-1:]
            raise CheckpointError(
                f"{self.name} holds {len(several)} checkpoints; name one of them, for example {last[0].name}."
            )
        checkpoint = several[0].open()
        checkpoint.folders += self.log_folders
        return checkpoint


def find(path: str | os.PathLike[str]) -> PathContents:
    """Examine a path, which may be anything; a file is not opened yet.

    Raises CheckpointError for a folder that cannot be listed, LimitExceededError for one with too many entries.
    """
    typed = os.fspath(path)
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # opening it reports the error
        return PathContents(typed)
    if not stat.S_ISDIR(mode):
        return PathContents(typed, is_file=stat.S_ISREG(mode))
    listing = list_folder(Path(path))
    return PathContents(typed, listing=listing, contents=contents_of(listing))
