"""Finds a folder's distributed checkpoints: its own, those that accelerate puts into inner folders, and slices."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.layouts.dcp import DistributedContent, metadata_in, read_distributed
from ampdoctor.checkpoints.layouts.dcp_metadata import METADATA
from ampdoctor.checkpoints.layouts.dcp_safetensors import SLICES, read_slices
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote

_SAVED_APART = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""Folders into which accelerate (and through it the Trainer) puts the model and the optimizer of an FSDP run."""

_DATA = ".distcp"
_MAX_ENTRIES = 20_000
"""Names that are read in such a folder: one or two for each rank."""


@dataclass(slots=True)
class DistributedParts:
    """The distributed checkpoints of a folder.

    Attributes:
        parts: One part per checkpoint.
        errors: What should be there and is not.
        remarks: Harmless oddities.
        refusals: What cannot be read, and why.
        taken: Names of handled files that would otherwise pass for checkpoints of their own.
        index: The unit of the folder's other files (Lightning's `meta.pt` and Megatron's `common.pt` are parts of the
            same model); "" if they stand for themselves.
    """

    parts: list[Part] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    refusals: list[tuple[str, CheckpointError]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    index: str = ""

    def add(self, content: DistributedContent, index: str = "") -> None:
        """Add a checkpoint that was read."""
        self.parts.append(Part(content.file, content.sections, content.file.name, index, content.beside))
        self.errors += content.errors
        self.remarks += content.remarks


def distributed_parts(folder: Path, names: Sequence[str], prefix: str = "") -> DistributedParts:
    """Open the distributed checkpoints of a folder; the result tells what cannot be read.

    Args:
        folder: The folder.
        names: The names in it that belong to what is opened.
        prefix: The prefix of these names in reports.
    """
    found = DistributedParts()
    for inner in ["", *filter(_SAVED_APART.fullmatch, names)]:
        described = [name for name in metadata_in(folder / inner) if inner or name in names]
        below = f"{prefix}{inner}/" if inner else prefix
        data = _data_files(folder / inner, None if inner else names)
        if not described:
            if data:
                found.errors.append(_undescribed(below, data))
            continue
        if not inner:
            found.index = prefix + METADATA
        try:
            inside = read_distributed(folder / inner, below)
        except CheckpointError as error:
            found.refusals.append((below + described[0], error))
            continue
        found.add(inside, "" if inner else found.index)
        used = {file.path.name for file in inside.beside}
        found.taken.update(used if not inner else ())
        told = {error.what for error in inside.errors}
        left = [name for name in data if name not in used and below + name not in told]
        if left:
            found.remarks.append(f"{below}{described[0]} puts nothing into {_some(left)}: not part of this checkpoint")
    slices = [name for name in names if SLICES.fullmatch(name)]
    try:
        content = read_slices(folder, slices, prefix)
    except CheckpointError as error:
        found.taken.update(slices)  # alone, a slice would pass for a whole tensor
        found.refusals.append((prefix + slices[0], error))
    else:
        if content is not None:
            found.taken.update(slices)
            found.add(content)
    return found


def _data_files(folder: Path, names: Sequence[str] | None) -> list[str]:
    """Returns names of a distributed checkpoint's data files in a folder, among `names` if they are given."""
    if names is None:
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in itertools.islice(entries, _MAX_ENTRIES)]
        except OSError:
            return []
    return sorted(name for name in names if name.endswith(_DATA))


def _undescribed(below: str, data: Sequence[str]) -> ErrorNote:
    """Returns an error for data files without `.metadata`, which is written last: the save was interrupted."""
    message = (
        f"{below}{METADATA} is missing: nothing says what lies in {_some(data)}. "
        "It is written last, so that the save was probably interrupted."
    )
    return ErrorNote(what=below + METADATA, kind="missing", message=message)


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more files" if len(names) > 1 else "")
