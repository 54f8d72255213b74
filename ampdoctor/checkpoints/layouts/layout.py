"""The interface between the walk through a checkpoint's folders and the layouts of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.layouts.gathering import Gathering
from ampdoctor.checkpoints.storage.listing import Listing


@dataclass(slots=True)
class Level:
    """A folder of a checkpoint while it is being read.

    Attributes:
        listing: The folder, and the names in it that belong to the checkpoint.
        prefix: The prefix of these names in reports ("global_step10/").
        taken: Names that a layout has handled; later layouts skip them.
        unit: The unit of all its parts that no index lists, as in `Part.index`; "" if each is its own.
        indexed: True if an index lists numbered shards, so that other numbered files are left from another save.
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
    """A framework's way of spreading a checkpoint over the files of a folder.

    Attributes:
        name: The format of a checkpoint with a part that it has read (`Checkpoint.format`); "" if several frameworks
            use the layout, and other files in the folder tell which.
        claims: Does it read a file or folder of this name? It is also asked about names that reports may get, because
            none of them may be a part of what the next run reads.
        read: Adds the contents of the claimed names to the `Gathering`, and the handled names to `Level.taken`. What
            cannot be read is noted in the `Gathering`, and never raised.
    """

    name: str
    claims: Callable[[str], bool]
    read: Callable[[Gathering, Level, Sequence[str]], None]
