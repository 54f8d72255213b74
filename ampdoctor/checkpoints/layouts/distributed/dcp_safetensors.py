"""Slices in safetensors, as `torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)` writes them.

Each rank's file holds its slices under the names of the whole tensors, and its metadata say where each slice begins.
Nothing says how large the whole tensors are, so only the files' numbers show that slices are missing at the end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.contents.structure import Sections
from ampdoctor.checkpoints.formats.bounded_json import parse_json
from ampdoctor.checkpoints.formats.safetensors_file import SafetensorsContent, read_safetensors
from ampdoctor.checkpoints.layouts.distributed.dcp import MAX_NOTES, DistributedContent
from ampdoctor.checkpoints.layouts.distributed.tiling import TilingBudget, misfit
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.checkpoints.storage.stored import Shard, ShardedTensor, StoredTensor, StridedTensor
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote

SLICES = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
"""File names of the writer; such a file is read as slices only if its header says so."""
_WHERE = "DCP_SHARDING_INFO"
"""The key of the header's metadata that says where each slice begins."""


def read_slices(folder: Path, names: Sequence[str], prefix: str = "") -> DistributedContent | None:
    """Join the slices of a folder; None if it has none.

    Args:
        folder: The folder with the files.
        names: Names of files in it that match `SLICES`.
        prefix: The prefix of these names in reports.

    Raises:
        CheckpointError: A file of slices cannot be read, or slices do not fit together.
    """
    files: list[RegularFile] = []
    try:
        contents: list[SafetensorsContent] = []
        for name in sorted(names):
            file = RegularFile(folder / name, prefix + name)
            files.append(file)
            contents.append(read_safetensors(file))
        if not contents or not all(_WHERE in content.metadata for content in contents):
            for file in files:
                file.close()
            return None
        tensors = _joined(contents, files)
        sections = Sections(
            models={"": tensors}, skipped=[s for content in contents for s in content.skipped], ordered=False
        )
        return DistributedContent(files[0], tuple(files[1:]), sections, _missing(names))
    except BaseException:
        for file in files:
            file.close()
        raise


def _joined(contents: Sequence[SafetensorsContent], files: Sequence[RegularFile]) -> dict[str, StoredTensor]:
    pieces: dict[str, list[Shard]] = {}
    for content, file in zip(contents, files, strict=True):
        starts = _starts(content, file.name)
        for name, stored in content.tensors.items():
            at = starts.get(name, (0,) * len(stored.shape))
            if not isinstance(stored, StridedTensor) or len(at) != len(stored.shape):
                raise CheckpointError(f"{file.name} is corrupted: it does not say where its slice of {name!r} begins.")
            pieces.setdefault(name, []).append(Shard(stored=stored, at=at))
    budget = TilingBudget()
    return {name: _whole(name, shards, budget) for name, shards in pieces.items()}


def _starts(content: SafetensorsContent, file: str) -> dict[str, tuple[int, ...]]:
    try:
        table: Any = parse_json(content.metadata[_WHERE].encode(), file, strict=False)
        starts = {name: entry["saved_offsets"] for name, entry in table.items()}
    except (ValueError, AttributeError, TypeError, KeyError):
        raise CheckpointError(f"{file} is corrupted: what it says of its slices is malformed.") from None
    for name, at in starts.items():
        if not isinstance(at, list) or not all(type(v) is int and 0 <= v < 2**62 for v in at):
            raise CheckpointError(f"{file} is corrupted: the place of its slice of {name!r} is malformed.")
    return {name: tuple(at) for name, at in starts.items()}


def _whole(name: str, shards: list[Shard], budget: TilingBudget) -> StoredTensor:
    first = shards[0].stored
    if any(s.stored.dtype != first.dtype or len(s.stored.shape) != len(first.shape) for s in shards):
        raise CheckpointError(f"the slices of {name!r} have different dtypes or numbers of dimensions; refused.")
    by_box: dict[Any, Shard] = {}
    for shard in shards:  # every rank may have saved a tensor that is not sharded
        by_box.setdefault((shard.at, shard.stored.shape), shard)
    kept = list(by_box.values())
    ends = [[a + n for a, n in zip(_at(s), s.stored.shape, strict=True)] for s in kept]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    wrong = misfit(shape, [(_at(s), s.stored.shape) for s in kept], repr(name), budget)
    if wrong is not None:
        raise CheckpointError(f"{name!r} cannot be put together from its slices: {wrong}.")
    solid = [s for s in kept if s.stored.numel] or kept[:1]
    return (
        kept[0].stored
        if len(kept) == 1 and shape == first.shape
        else ShardedTensor(dtype=first.dtype, shape=shape, shards=tuple(solid))
    )


def _at(shard: Shard) -> tuple[int, ...]:
    return shard.at if isinstance(shard.at, tuple) else (shard.at,)


def _missing(names: Sequence[str]) -> list[ErrorNote]:
    """Returns a note for each of the first missing numbers before the last file."""
    there = {int(match[1]) for name in names if (match := SLICES.fullmatch(name))}
    absent = (n for n in range(1, max(there, default=0)) if n not in there)  # a name can hold any number
    return [
        ErrorNote(what=f"shard {n}", kind="missing", message=f"The file of shard {n} is not there, but later ones are.")
        for n in itertools.islice(absent, MAX_NOTES)
    ]
