"""The `.metadata` of `torch.distributed.checkpoint` (torch 2.0 to 2.13; Megatron adds fields), by the inert machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ampdoctor.checkpoints.files import RegularFile, plain_name
from ampdoctor.checkpoints.pickled_objects import fields_of
from ampdoctor.checkpoints.stored_tensor import MAX_DIMENSIONS, READ_DTYPES
from ampdoctor.checkpoints.torch_objects import TensorBuilder
from ampdoctor.checkpoints.unpickler import MAX_OBJECT_BYTES, MAX_OPCODES, GlobalName, PickledObject, SafeUnpickler
from ampdoctor.errors import CheckpointError, LimitExceededError

METADATA = ".metadata"

MAX_METADATA_BYTES = 32 * 1024 * 1024
"""A piece takes 140 to 230 bytes: enough for 500 tensors with two moments each, cut over 96 ranks or more."""
MAX_PIECES = 1_000_000
"""For all tensors together; a pickle can name one list of pieces for every tensor."""

_COST = 40
"""Allowed cost of objects (in the machine's counting) per byte of `.metadata`; honest files cost 24 (measured)."""

_DTYPES = {str(dtype): dtype for dtype in READ_DTYPES}

_OWN = frozenset(
    {
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),  # Megatron keeps every rank's plan
        "pathlib.PosixPath", "pathlib.WindowsPath",
    }
)  # fmt: skip
"""Classes of the format itself, which every `.metadata` uses."""

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where the bytes of a piece or an object are."""

    file: str  # beside `.metadata`
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor; `at` is its first element's index in each dimension, `place` None if the file lacks it."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    place: ChunkLocation | None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The description of a whole tensor; `dtype` is a name if it is not one that is read."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class DistributedMetadata:
    """The contents of a `.metadata`, by names in the flattened state dict."""

    entries: dict[str, TensorPlan | ChunkLocation | None]  # tensors and other objects in order; None without a place
    paths: dict[str, Path_]  # name -> keys of the nested state dict, if known
    unsafe_globals: tuple[str, ...]  # names of classes that are not torch's own


def read_metadata(file: RegularFile) -> DistributedMetadata:
    """Parse and check a `.metadata`; raises CheckpointError if it refers to a file that is not beside it."""
    if file.size > MAX_METADATA_BYTES:
        raise LimitExceededError(f"{file.name}: bytes", MAX_METADATA_BYTES, file.size)
    machine = SafeUnpickler(
        file.read(0, file.size),
        file.name,
        TensorBuilder(file, None),
        max_opcodes=max(MAX_OPCODES, file.size),
        max_object_bytes=max(MAX_OBJECT_BYTES, _COST * file.size),
    )
    root, _ = machine.run()
    fields = fields_of(root)
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{file.name} is not that of a distributed checkpoint.")
    places = _places(stored, file.name)
    entries: dict[str, TensorPlan | ChunkLocation | None] = {}
    pieces = 0
    for name, entry in described.items():
        if not isinstance(name, str):
            raise _malformed(file.name, "the name of an entry is no string")
        content = fields_of(entry)
        if "chunks" not in content:
            entries[name] = places.get((name, None))
            continue
        chunks = content["chunks"]
        if not isinstance(chunks, list):
            raise _malformed(file.name, f"the pieces of {name[:200]!r} are no list")
        pieces += len(chunks)
        if pieces > MAX_PIECES:
            raise LimitExceededError(f"{file.name}: pieces of tensors", MAX_PIECES, pieces)
        entries[name] = _tensor(name, content, places, file.name)
    return DistributedMetadata(
        entries=entries,
        paths=_paths(fields.get("planner_data")),
        unsafe_globals=tuple(name for name in machine.unsafe_globals if name not in _OWN),
    )


def _malformed(file: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is corrupted: {why}.")


def _places(stored: Mapping[Any, Any], file: str) -> dict[tuple[str, tuple[int, ...] | None], ChunkLocation]:
    places: dict[tuple[str, tuple[int, ...] | None], ChunkLocation] = {}
    plain: set[str] = set()
    for key, value in stored.items():
        index, info = fields_of(key), fields_of(value)
        name, at = index.get("fqn"), index.get("offset")
        if not isinstance(name, str) or not (at is None or _is_sizes(at)):
            raise _malformed(file, "the key of a place is malformed")
        path = info.get("relative_path")
        if not isinstance(path, str) or path not in plain:
            path = plain_name(path, file)
            plain.add(path)
        offset, length = info.get("offset"), info.get("length")
        if not _is_size(offset) or not _is_size(length):
            raise _malformed(file, f"the place of {name[:200]!r} is malformed")
        where = (name, None if at is None else tuple(at))
        if where in places:
            raise _malformed(file, f"a piece of {name[:200]!r} has two places")
        places[where] = ChunkLocation(path, offset, length)
    return places


def _tensor(
    name: str, content: Mapping[Any, Any], places: Mapping[tuple[str, tuple[int, ...] | None], ChunkLocation], file: str
) -> TensorPlan:
    shape = content.get("size")
    if not _is_sizes(shape) or math.prod(shape) >= 2**63:
        raise _malformed(file, f"the sizes of {name[:200]!r} are malformed")
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = {}
    for chunk in content["chunks"]:
        box = fields_of(chunk)
        at, sizes = box.get("offsets"), box.get("sizes")
        if not _is_sizes(at) or not _is_sizes(sizes):
            raise _malformed(file, f"a piece of {name[:200]!r} is malformed")
        # replicas list one piece once for each of their ranks; it is stored once
        pieces[at, sizes] = Piece(at, sizes, places.get((name, at)))
    return TensorPlan(_dtype(content.get("properties")), shape, tuple(pieces.values()))


def _dtype(properties: Any) -> torch.dtype | str:
    """Returns the element type from `TensorProperties`, whose state is a tuple that begins with it."""
    state = properties.state if isinstance(properties, PickledObject) else None
    dtype = state[0] if isinstance(state, tuple) and state else fields_of(properties).get("dtype")
    name = dtype.name if isinstance(dtype, GlobalName) else "?"
    return _DTYPES.get(name, name.removeprefix("torch.")[:40])


def _paths(planned: Any) -> dict[str, Path_]:
    """Returns the paths from the default planner's `planner_data`; other planners store something else, or nothing."""
    if not isinstance(planned, dict):
        return {}
    return {
        name: path
        for name, path in planned.items()
        if isinstance(name, str) and isinstance(path, tuple) and path and all(type(k) in {str, int} for k in path)
    }


def _is_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and all(_is_size(v) for v in value)


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63
