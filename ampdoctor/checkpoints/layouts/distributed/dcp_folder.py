"""Which distributed checkpoints a folder holds: its own, those that accelerate keeps apart in it, and slices."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.layouts.distributed.dcp import DistributedContent, metadata_in, read_distributed
from ampdoctor.checkpoints.layouts.distributed.dcp_metadata import METADATA
from ampdoctor.checkpoints.layouts.distributed.dcp_safetensors import SLICES, read_slices
from ampdoctor.checkpoints.layouts.gathering import Gathering
from ampdoctor.checkpoints.layouts.layout import Layout, Level
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote

_SAVED_APART = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""Folders into which accelerate (and through it the Trainer) puts the model and the optimizer of an FSDP run."""

_DATA = ".distcp"
_MAX_ENTRIES = 20_000
"""Names that are looked at in such a folder: one or two for each rank."""


_Refusal = tuple[str, CheckpointError]
"""A file, and why it cannot be read."""


def _claims(name: str) -> bool:
    return name.endswith((METADATA, _DATA)) or any(p.fullmatch(name) for p in (_SAVED_APART, SLICES))


def _read(into: Gathering, level: Level, names: Sequence[str]) -> None:
    """Open the distributed checkpoints of a folder; what was refused is told after what is missing."""
    folders = ["", *filter(_SAVED_APART.fullmatch, names)]
    refused = [_add(into, level, inner, names) for inner in folders]
    refused.append(_add_slices(into, level, [name for name in names if SLICES.fullmatch(name)]))
    for refusal in filter(None, refused):
        into.refuse(*refusal)


def _add(into: Gathering, level: Level, inner: str, names: Sequence[str]) -> _Refusal | None:
    """Open the distributed checkpoint of the folder, or of a folder in it."""
    folder, below = level.path / inner, f"{level.prefix}{inner}/" if inner else level.prefix
    if inner:
        names = _names(folder)
    described = metadata_in(folder, names)
    data = [name for name in names if name.endswith(_DATA)]
    if not described:
        if data:
            into.errors.append(_undescribed(below, data))
        return None
    if not inner:
        level.unit = level.prefix + METADATA
    try:
        inside = read_distributed(folder, described, below)
    except CheckpointError as error:
        return below + described[0], error
    _take(into, inside, "" if inner else level.unit)
    used = {file.path.name for file in inside.beside}
    level.taken.update(used if not inner else ())
    told = {error.what for error in inside.errors}
    left = [name for name in data if name not in used and below + name not in told]
    if left:
        into.remarks.append(f"{below}{described[0]} puts nothing into {_some(left)}: not part of this checkpoint")
    return None


def _add_slices(into: Gathering, level: Level, slices: Sequence[str]) -> _Refusal | None:
    try:
        content = read_slices(level.path, slices, level.prefix)
    except CheckpointError as error:
        level.taken.update(slices)  # a slice by itself would pass for a tensor
        return level.prefix + slices[0], error
    if content is not None:
        level.taken.update(slices)
        _take(into, content)
    return None


def _take(into: Gathering, content: DistributedContent, index: str = "") -> None:
    into.parts.append(Part(content.file, content.sections, content.file.name, index, content.beside))
    into.errors += content.errors
    into.remarks += content.remarks


def _names(folder: Path) -> list[str]:
    """What lies in such a folder, by name; [] where it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in itertools.islice(entries, _MAX_ENTRIES))
    except OSError:
        return []


def _undescribed(below: str, data: Sequence[str]) -> ErrorNote:
    """`.metadata` is written last: a save that was interrupted leaves data files without it."""
    message = (
        f"{below}{METADATA} is missing: nothing says what lies in {_some(data)}. "
        "It is written last, so that the save was probably interrupted."
    )
    return ErrorNote(what=below + METADATA, kind="missing", message=message)


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more files" if len(names) > 1 else "")


DISTRIBUTED = Layout(name="", claims=_claims, read=_read)
