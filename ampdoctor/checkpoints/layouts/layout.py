"""The seam between the walk through a checkpoint's folders and the layouts that frameworks use there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.layouts.gathering import Gathering
from ampdoctor.checkpoints.storage.listing import Listing


@dataclass(slots=True)
class Level:
    """A folder of a checkpoint while it is read.

    Attributes:
        listing: The folder, and what in it belongs to the checkpoint.
        prefix: What reports put before the names in it ("global_step10/").
        taken: Names that a layout has dealt with; the layouts after it leave them alone.
        unit: What all its parts belong to that no index lists, as in `Part.index`; "": each stands by itself.
        indexed: Whether an index lists numbered shards, so that others are left from another save.
    """

    listing: Listing
    prefix: str = ""
    taken: set[str] = field(default_factory=set)
    unit: str = ""
    indexed: bool = False

    @property
    def path(self) -> Path:
        """The folder."""
        return self.listing.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way in which frameworks lay a checkpoint out over the files of a folder.

    Attributes:
        name: What reports call a checkpoint of which it read a part (`Checkpoint.format`); "" where several
            frameworks use it, and what else lies in the folder says which.
        claims: Whether a file or folder of this name is for it to read. It is also asked for names that reports may
            have, none of which may be a part of what the next run reads.
        read: Adds what is in the names that it claims to the `Gathering`, and the names that it has dealt with to
            `Level.taken`. What cannot be read is told in the `Gathering`, and never raised.
    """

    name: str
    claims: Callable[[str], bool]
    read: Callable[[Gathering, Level, Sequence[str]], None]
