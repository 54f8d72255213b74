"""Gathers the parts of a checkpoint, and defines a layout: the names that it claims, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ampdoctor.checkpoints.checkpoint import FilePart
from ampdoctor.checkpoints.file_contents import FileContents, classify_contents
from ampdoctor.checkpoints.files import Listing, RegularFile
from ampdoctor.checkpoints.pickled_objects import Saved
from ampdoctor.checkpoints.safetensors_file import read_safetensors
from ampdoctor.checkpoints.torch_files import Format, read_torch_legacy, read_torch_zip, sniff
from ampdoctor.errors import CheckpointError, LimitExceededError, OtherFormatError
from ampdoctor.evidence.report import ErrorNote, Skipped
from ampdoctor.evidence.run_facts import PROFILE_MARK

_SLICES = re.compile(r"(.*/)?shard-\d+-model-\d+-of-\d+\.safetensors")
"""Files of `HuggingFaceStorageWriter(save_distributed=True)`, if their headers have the key `_SLICED`."""
_SLICED = "DCP_SHARDING_INFO"

Reader: TypeAlias = Callable[[RegularFile], FileContents]


@dataclass(slots=True)
class CheckpointBuilder:
    """A checkpoint that is being opened; most fields are as in `Checkpoint`."""

    layout: str = "folder"  # as in `Checkpoint.format`
    parts: list[FilePart] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    refusals: list[CheckpointError] = field(default_factory=list)  # the first is raised if nothing can be read
    folders: list[tuple[Listing, str]] = field(default_factory=list)
    global_step: int | None = None

    def refuse(self, name: str, error: CheckpointError) -> None:
        """Note a file that cannot be read. A file of another format is only skipped, unless nothing else is there."""
        self.refusals.append(error)
        if isinstance(error, OtherFormatError):
            self.skipped.append(Skipped(what=name, reason=str(error)))
            return
        kind = "limit" if isinstance(error, LimitExceededError) else "unreadable"
        self.errors.append(ErrorNote(what=name, kind=kind, message=str(error)))

    def lack(self, name: str, message: str) -> None:
        """Note a missing file."""
        self.errors.append(ErrorNote(what=name, kind="missing", message=message))

    def open(self, path: Path, name: str) -> tuple[RegularFile, Saved] | None:
        """Open a file of `torch.save` and read its structure; None if it was refused, which is noted."""
        file = None
        try:
            file = RegularFile(path, name)
            return file, read_saved(file, sniff(file))
        except CheckpointError as error:
            self.refuse(name, error)
            if file is not None:
                file.close()
        return None

    def add(self, file: RegularFile, index: str = "", read: Reader | None = None) -> FilePart | None:
        """Add a file that is a part by itself; if it is refused, it is noted and closed, and None is returned."""
        try:
            contents = read_sections(file, sniff(file)) if read is None else read(file)
            part = FilePart(file, contents, file.name, index)
        except CheckpointError as error:
            file.close()
            self.refuse(file.name, error)
            return None
        self.parts.append(part)
        return part

    def add_file(self, path: Path, name: str, index: str = "", read: Reader | None = None) -> FilePart | None:
        """Open a file, called `name` in reports, and add it as a part; `read` is given for a format of the layout's."""
        try:
            file = RegularFile(path, name)
        except CheckpointError as error:
            self.refuse(name, error)
            return None
        return self.add(file, index, read)

    def close(self) -> None:
        """Close every file."""
        for part in self.parts:
            for file in part.files:
                file.close()


def read_saved(file: RegularFile, found: Format) -> Saved:
    """Returns the object in a file of `torch.save`; raises CheckpointError for another format."""
    if found not in {"torch-zip", "torch-legacy"}:
        raise CheckpointError(f"{file.name} should be a file of torch.save, and is not.")
    return read_torch_legacy(file) if found == "torch-legacy" else read_torch_zip(file)


def read_sections(file: RegularFile, found: Format) -> FileContents:
    """Returns the parts of a file that is a checkpoint by itself; raises OtherFormatError for a saved profile."""
    if found == "json":
        raise CheckpointError(f"{file.name} is a JSON file, not a checkpoint.")
    if found == "safetensors":
        content = read_safetensors(file)
        if PROFILE_MARK in content.metadata:
            raise OtherFormatError(f"{file.name} is a saved profile, not a checkpoint; `ampdoctor recommend` reads it.")
        if _SLICED in content.metadata and _SLICES.fullmatch(file.name):  # alone, a slice would pass for a whole tensor
            said = "holds slices of tensors, which are not read: save with enable_consolidation=True"
            raise CheckpointError(f"{file.name} {said}.")
        return FileContents(
            models={"": content.tensors} if content.tensors else {}, skipped=list(content.skipped), ordered=False
        )
    return classify_contents(read_saved(file, found))


# -- the interface between the walk through a checkpoint's folders and the layouts of frameworks --


@dataclass(slots=True)
class FolderState:
    """A folder of a checkpoint while it is being read; its files without an index are of `unit`, or alone."""

    listing: Listing  # only names that belong to the checkpoint
    prefix: str = ""  # of these names in reports ("global_step10/")
    taken: set[str] = field(default_factory=set)  # names that a layout has handled; later ones skip them
    unit: str = ""
    indexed: bool = False  # an index lists shards; other numbered files are of another save

    @property
    def path(self) -> Path:
        """The folder."""
        return self.listing.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A framework's way of spreading a checkpoint over the files of a folder.

    `name` is the resulting `Checkpoint.format` ("": other files decide), `claims` says whether it reads such a file or
    folder, and `read` adds those to the builder, and the handled names to `FolderState.taken`; it never raises.
    """

    name: str
    claims: Callable[[str], bool]
    read: Callable[[CheckpointBuilder, FolderState, Sequence[str]], None]
