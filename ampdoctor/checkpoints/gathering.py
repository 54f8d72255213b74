"""Gathers the parts of a checkpoint; and what a layout is: names that it claims, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.checkpoint import Part
from ampdoctor.checkpoints.file_contents import Sections, sort_out
from ampdoctor.checkpoints.files import Listing, RegularFile
from ampdoctor.checkpoints.pickled_objects import Saved
from ampdoctor.checkpoints.safetensors_file import read_safetensors
from ampdoctor.checkpoints.torch_files import Format, read_torch_legacy, read_torch_zip, sniff
from ampdoctor.errors import CheckpointError, LimitExceededError, OtherFormatError
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.evidence.run_facts import PROFILE_MARK


@dataclass(slots=True)
class Gathering:
    """A checkpoint that is being opened.

    Attributes:
        layout: Name of the layout, as in `Checkpoint.format`.
        parts, skipped, errors, remarks, log, global_step, spare_step: As in `Checkpoint`.
        own_log: True if `log` is the trainer's own log with the checkpoint, so that no other log counts.
        refusals: Why files were refused; the first one is raised if nothing can be read.
    """

    layout: str = "folder"
    parts: list[Part] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    refusals: list[CheckpointError] = field(default_factory=list)
    log: tuple[LogEntry, ...] = ()
    own_log: bool = False
    global_step: int | None = None
    spare_step: int | None = None

    def refuse(self, name: str, error: CheckpointError) -> None:
        """Note a file that cannot be read. A file of another format is only skipped, unless nothing else is there."""
        self.refusals.append(error)
        if isinstance(error, OtherFormatError):
            self.skipped.append(Skipped(what=name, reason=str(error)))
            return
        kind = "limit" if isinstance(error, LimitExceededError) else "unreadable"
        self.errors.append(ErrorNote(what=name, kind=kind, message=str(error)))

    def lack(self, name: str, message: str) -> None:
        """Note a file that should be there and is not."""
        self.errors.append(ErrorNote(what=name, kind="missing", message=message))

    def open(self, path: Path, name: str) -> tuple[RegularFile, Saved] | None:
        """Open a file of `torch.save` and read its structure; None if it was refused, which is noted."""
        try:
            file = RegularFile(path, name)
        except CheckpointError as error:
            self.refuse(name, error)
            return None
        try:
            return file, read_saved(file, sniff(file))
        except CheckpointError as error:
            self.refuse(name, error)
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def add(self, file: RegularFile, index: str = "") -> Part | None:
        """Add a file that is a part by itself; None if it was refused, which is noted.

        Args:
            file: The open file; it is closed again if it is refused.
            index: As in `Part`.
        """
        try:
            part = Part(file, read_sections(file, sniff(file)), file.name, index)
        except CheckpointError as error:
            file.close()
            self.refuse(file.name, error)
            return None
        self.parts.append(part)
        return part

    def close(self) -> None:
        """Close every file."""
        for part in self.parts:
            for file in part.files:
                file.close()


def read_saved(file: RegularFile, found: Format) -> Saved:
    """Returns the object in a file of `torch.save`.

    Raises:
        CheckpointError: The file is in another format, or corrupted.
    """
    if found not in {"torch-zip", "torch-legacy"}:
        raise CheckpointError(f"{file.name} should be a file of torch.save, and is not.")
    return read_torch_legacy(file) if found == "torch-legacy" else read_torch_zip(file)


def read_sections(file: RegularFile, found: Format) -> Sections:
    """Returns the parts of a file that is a checkpoint by itself.

    Raises:
        CheckpointError: It is not a checkpoint, or corrupted.
        OtherFormatError: It is a saved profile.
    """
    if found == "json":
        raise CheckpointError(f"{file.name} is a JSON file, not a checkpoint.")
    if found == "safetensors":
        content = read_safetensors(file)
        if PROFILE_MARK in content.metadata:
            raise OtherFormatError(f"{file.name} is a saved profile, not a checkpoint; `ampdoctor recommend` reads it.")
        return Sections(
            models={"": content.tensors} if content.tensors else {}, skipped=list(content.skipped), ordered=False
        )
    return sort_out(read_saved(file, found))


# The interface between the walk through a checkpoint's folders and the layouts of frameworks.


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
