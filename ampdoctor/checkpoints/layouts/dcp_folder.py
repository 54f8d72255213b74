"""Which distributed checkpoints a folder holds: its own, those that accelerate keeps apart in it, and slices."""

from __future__ import annotations

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


@dataclass(slots=True)
class DistributedParts:
    """The distributed checkpoints of a folder.

    Attributes:
        parts: One for each.
        errors: What should have been there and is not.
        remarks: Oddities that harm nothing.
        refusals: What cannot be read, and why.
        taken: Names of the folder's files that would pass for checkpoints of their own, and are dealt with.
        index: What the folder's other files belong to (Lightning's `meta.pt`, Megatron's `common.pt` are parts of the
            same model); "" where they stand by themselves.
    """

    parts: list[Part] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    refusals: list[tuple[str, CheckpointError]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    index: str = ""

    def add(self, content: DistributedContent, index: str = "") -> None:
        """Add one that was read."""
        self.parts.append(Part(content.file, content.sections, content.file.name, index, content.beside))
        self.errors += content.errors
        self.remarks += content.remarks


def distributed_parts(folder: Path, names: Sequence[str], prefix: str = "") -> DistributedParts:
    """Open the distributed checkpoints of a folder; what cannot be read is told in the result.

    Args:
        folder: Where to look.
        names: The names in it that belong to what is opened.
        prefix: What stands before those in reports.
    """
    found = DistributedParts()
    for inner in ["", *filter(_SAVED_APART.fullmatch, names)]:
        described = [name for name in metadata_in(folder / inner) if inner or name in names]
        if not described:
            continue
        below = f"{prefix}{inner}/" if inner else prefix
        if not inner:
            found.index = prefix + METADATA
        try:
            found.add(read_distributed(folder / inner, below), "" if inner else found.index)
        except CheckpointError as error:
            found.refusals.append((below + described[0], error))
    slices = [name for name in names if SLICES.fullmatch(name)]
    try:
        content = read_slices(folder, slices, prefix)
    except CheckpointError as error:
        found.taken.update(slices)  # a slice by itself would pass for a tensor
        found.refusals.append((prefix + slices[0], error))
    else:
        if content is not None:
            found.taken.update(slices)
            found.add(content)
    return found
