"""Collects what opening a checkpoint's files finds: parts, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.contents.structure import Sections, sort_out
from ampdoctor.checkpoints.formats.safetensors_file import read_safetensors
from ampdoctor.checkpoints.formats.sniff import Format, sniff
from ampdoctor.checkpoints.formats.torch_legacy import read_torch_legacy
from ampdoctor.checkpoints.formats.torchzip import read_torch_zip
from ampdoctor.checkpoints.pickles.tree import Saved
from ampdoctor.checkpoints.storage.files import RegularFile
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
