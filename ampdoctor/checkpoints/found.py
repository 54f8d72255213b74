"""What lies at a path that somebody named: looked at once, and handed down to whoever works on it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.family import Family, Member, family_in
from ampdoctor.checkpoints.layouts.folder import open_file, open_folder
from ampdoctor.checkpoints.run_log import RunLog, run_log
from ampdoctor.checkpoints.storage.listing import Listing, list_folder
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import Skipped


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at a path.

    Attributes:
        typed: The path as it was typed.
        is_file: Whether it is a regular file, or a link to one.
        listing: The folder that it is; None where it is none.
        family: The checkpoints of a run in that folder; None where it is one checkpoint, or none.
    """

    typed: str
    is_file: bool = False
    listing: Listing | None = None
    family: Family | None = None

    @property
    def path(self) -> Path:
        """The path."""
        return Path(self.typed)

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.path.name or self.typed

    @property
    def members(self) -> tuple[Member, ...]:
        """The checkpoints of a run; () where it is no folder of them."""
        return self.family.members if self.family is not None else ()

    def log(self) -> tuple[RunLog, tuple[Skipped, ...]]:
        """The log of the run whose folder it is, and what of the logs in it could not be read."""
        return run_log(self.listing, self.family) if self.listing is not None and self.family is not None else ((), ())

    def open(self) -> Checkpoint:
        """Read the structure of the only checkpoint that it is or holds, and the log of its run.

        Raises:
            CheckpointError: It cannot be read, or is a folder of several; the sentence names the last of them.
        """
        if self.listing is None:
            return open_file(self.path)
        if self.family is None:
            return open_folder(self.listing)
        several = self.members
        if len(several) > 1:
            last = [member for member in several if member.placed and not member.files][-1:] or several[-1:]
            raise CheckpointError(
                f"{self.name} holds {len(several)} checkpoints; name one of them, for example {last[0].name}."
            )
        log, unread = self.log()
        checkpoint = several[0].open()
        checkpoint.take_log(log, unread)
        return checkpoint


def find(path: str | os.PathLike[str]) -> Found:
    """Look at what lies at a path; a file is not opened yet.

    Args:
        path: A checkpoint as for `open_checkpoint`, a run's folder with one or many of them, or anything else.

    Raises:
        CheckpointError: It is a folder that cannot be listed.
        LimitExceededError: It is a folder of too many entries.
    """
    typed = os.fspath(path)
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # opening it says why
        return Found(typed)
    if not stat.S_ISDIR(mode):
        return Found(typed, is_file=stat.S_ISREG(mode))
    listing = list_folder(Path(path))
    return Found(typed, listing=listing, family=family_in(listing))
