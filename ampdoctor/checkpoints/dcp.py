"""Distributed checkpoints of torch (DCP): chunks of tensors in the files of all ranks."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch

from ampdoctor.checkpoints.checkpoint import FilePart
from ampdoctor.checkpoints.dcp_names import sections_of
from ampdoctor.checkpoints.files import RegularFile, Window, is_folder, list_folder, plain_name
from ampdoctor.checkpoints.gathering import CheckpointBuilder, FolderState, Layout
from ampdoctor.checkpoints.pickled_objects import fields_of
from ampdoctor.checkpoints.stored_tensor import (
    MAX_DIMENSIONS,
    READ_DTYPES,
    JoinedTensor,
    Shard,
    StoredTensor,
    StridedTensor,
    unread,
    unread_dtype,
)
from ampdoctor.checkpoints.torch_files import read_torch_zip
from ampdoctor.checkpoints.torch_objects import TensorBuilder
from ampdoctor.checkpoints.unpickler import MAX_OBJECT_BYTES, MAX_OPCODES, GlobalName, PickledObject, SafeUnpickler
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import ErrorNote, Skipped

# -- `.metadata` (torch 2.0 to 2.13; Megatron adds fields), by the inert machine --

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
        entries[name] = _planned(name, content, places, file.name)
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


def _planned(
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


# -- do the pieces of a tensor fill it exactly? --

MAX_COMPARISONS = 6_000_000
"""Compared coordinates for one checkpoint, a second or two: a million pieces cut in one dimension."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of the first element in each dimension, and sizes."""


@dataclass(slots=True)
class TilingBudget:
    """How many coordinates may still be compared: a kilobyte can describe a few pieces of many dimensions."""

    left: int = MAX_COMPARISONS

    def spend(self, coordinates: int, name: str) -> None:
        """Spend coordinates; raises LimitExceededError if not that many are left."""
        if coordinates > self.left:
            used = MAX_COMPARISONS - self.left
            raise LimitExceededError(f"{name}: comparisons of pieces", MAX_COMPARISONS, used + coordinates)
        self.left -= coordinates


def misfit(shape: tuple[int, ...], boxes: Sequence[Box], name: str, budget: TilingBudget) -> str | None:
    """Returns in words why pieces do not fill a tensor of this shape exactly; None if they do.

    The boxes' indicator functions sum to that of the whole exactly if their signed corners do (signs by the parity of
    the upper sides), which takes n steps for n pieces. `name` is for the error where `budget` is used up.
    """
    if any(not _inside(shape, box) for box in boxes):
        return "a piece lies outside it"
    solid = [box for box in boxes if 0 not in box[1]]
    covered = sum(math.prod(sizes) for _, sizes in solid)
    whole = math.prod(shape)
    if covered != whole:
        return "its pieces leave a hole" if covered < whole else "its pieces overlap"
    cut = [d for d, size in enumerate(shape) if any(sizes[d] != size for _, sizes in solid)]
    budget.spend(len(solid) * len(cut) << len(cut), name)
    corners: Counter[tuple[int, ...]] = Counter()
    for at, sizes in [*solid, ((0,) * len(shape), shape)] if cut else []:
        sign = -1 if sizes == shape else 1
        for upper in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(at[d] + up * sizes[d] for d, up in zip(cut, upper, strict=True))
            corners[corner] += -sign if sum(upper) % 2 else sign
    return "its pieces overlap and leave a hole" if any(corners.values()) else None


def _inside(shape: tuple[int, ...], box: Box) -> bool:
    at, sizes = box
    return len(at) == len(sizes) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(at, sizes, shape, strict=True)
    )


MAX_NOTES = 20
"""Unreadable entries that are listed one by one; the others are counted."""


Opened: TypeAlias = tuple[FilePart, list[ErrorNote]]
"""A distributed checkpoint as one part, and what is missing or unreadable."""


def read_distributed(folder: Path, prefix: str = "") -> Opened:
    """Read the structure of a distributed checkpoint; reports show its files with `prefix` ("optimizer_0/")."""
    with ExitStack() as opened:
        metadata = opened.enter_context(RegularFile(folder / METADATA, prefix + METADATA))
        found = _Reading(folder, prefix, opened).content(read_metadata(metadata), metadata)
        opened.pop_all()
    return found


class _Unreadable(Exception):  # noqa: N818 - not an error: it is reported once for each file
    """An entry lies in a file whose error has been reported."""


class _Reading:
    """Opens one checkpoint; `files` are the data files that could be opened, by name."""

    def __init__(self, folder: Path, prefix: str, opened: ExitStack) -> None:
        self.files: dict[str, RegularFile] = {}
        self._opened = opened
        self._budget = TilingBudget()
        self._folder = folder
        self._name = prefix + METADATA
        self._prefix = prefix
        self._errors: list[ErrorNote] = []
        self._bad: list[tuple[str, str]] = []
        self._foreign: dict[str, None] = {}

    def content(self, described: DistributedMetadata, metadata: RegularFile) -> Opened:
        entries = described.entries
        objects = [entry for entry in entries.values() if not isinstance(entry, TensorPlan)]
        pieces = [piece for entry in entries.values() if isinstance(entry, TensorPlan) for piece in entry.pieces]
        self._open([place for place in (*(piece.place for piece in pieces), *objects) if place is not None])
        self._foreign.update(dict.fromkeys(described.unsafe_globals))
        values: dict[str, Any] = {}
        for name, entry in entries.items():
            try:
                values[name] = self._tensor(name, entry) if isinstance(entry, TensorPlan) else self._object(entry)
            except _Unreadable:
                continue
            except CheckpointError as error:
                self._bad.append((name, str(error)))
        self._tell_bad()
        if not values and self._errors:
            raise CheckpointError(self._errors[0].message)
        sections = sections_of(values, described.paths, tuple(self._foreign), self._name)
        sections.ordered = len(self.files) == 1  # the tensors of several ranks are listed rank by rank
        return FilePart(metadata, sections, self._name, beside=tuple(self.files.values())), self._errors

    def _open(self, places: Iterable[ChunkLocation]) -> None:
        """Open all data files, and check that the places lie inside them and do not overlap."""
        by_file: dict[str, list[ChunkLocation]] = {}
        for place in places:
            by_file.setdefault(place.file, []).append(place)
        for name, wanted in sorted(by_file.items()):
            shown = self._prefix + name
            try:
                file = self._opened.enter_context(RegularFile(self._folder / name, shown))
            except CheckpointError as error:
                kind = "unreadable" if os.path.lexists(self._folder / name) else "missing"
                message = f"{self._name} puts {len(wanted)} entries into this file: {error}"
                self._errors.append(ErrorNote(what=shown, kind=kind, message=message))
                continue
            self.files[name] = file
            self._require_apart(wanted)
            end = max(place.offset + place.length for place in wanted)
            if end > file.size:
                message = f"{shown} is truncated: {self._name} puts {end} bytes into it and it has {file.size}."
                self._errors.append(ErrorNote(what=shown, kind="truncated", message=message))

    def _require_apart(self, places: list[ChunkLocation]) -> None:
        end = 0
        for place in sorted(places, key=lambda place: place.offset):
            if place.offset < end:
                raise CheckpointError(
                    f"{self._name} is refused: two of its entries share bytes of {self._prefix}{place.file}."
                )
            end = place.offset + place.length

    def _window(self, place: ChunkLocation | None) -> Window:
        if place is None:
            raise CheckpointError("it is described, but nothing says where it lies")
        file = self.files.get(place.file)
        if file is None or place.offset + place.length > file.size:
            raise _Unreadable
        return Window(file, place.offset, place.length)

    def _object(self, place: ChunkLocation | None) -> Any:
        """Returns what `torch.save` wrote there: a tensor, or a Python object with tensors inside."""
        window = self._window(place)
        if window.head(4) != b"PK\x03\x04":
            raise CheckpointError(f"what lies at byte {window.origin} of {window.name} was not written by torch.save")
        saved = read_torch_zip(window)
        self._foreign.update(dict.fromkeys(saved.unsafe_globals))
        return saved.tree

    def _tensor(self, name: str, plan: TensorPlan) -> StoredTensor | Skipped:
        if isinstance(plan.dtype, str):
            return unread_dtype(plan.dtype)
        boxes = [(piece.at, piece.shape) for piece in plan.pieces]
        wrong = misfit(plan.shape, boxes, f"{self._name}: {name[:200]!r}", self._budget)
        if wrong is not None:
            raise CheckpointError(f"{wrong}, as {self._name} describes it")
        shards: list[Shard] = []
        for piece in plan.pieces:
            if len(plan.pieces) > 1 and 0 in piece.shape:
                continue
            stored = self._piece(piece)
            if isinstance(stored, Skipped):
                return stored
            if stored.shape != piece.shape or stored.dtype != plan.dtype:
                raise CheckpointError(
                    f"{self._name} describes a piece of it as {_words(piece.shape, plan.dtype)}, and what lies in "
                    f"{stored.file_name} is {_words(stored.shape, stored.dtype)}"
                )
            shards.append(Shard(stored=stored, at=piece.at))
        if not shards:
            raise CheckpointError("it has no pieces")
        if len(shards) == 1:
            return shards[0].stored
        return JoinedTensor(dtype=plan.dtype, shape=plan.shape, shards=tuple(shards))

    def _piece(self, piece: Piece) -> StridedTensor | Skipped:
        found = self._object(piece.place)
        if isinstance(found, StridedTensor | Skipped):
            return found
        kind = found.name[:80] if isinstance(found, PickledObject) else type(found).__name__
        return unread(f"a tensor that was saved as {kind} is not read")

    def _tell_bad(self) -> None:
        for name, why in self._bad[:MAX_NOTES]:
            message = f"{name[:200]!r} cannot be read: {why.rstrip('.')}."
            self._errors.append(ErrorNote(what=name[:200], kind="unreadable", message=message))
        rest = len(self._bad) - MAX_NOTES
        if rest > 0:
            message = f"{rest} more entries of {self._name} cannot be read."
            self._errors.append(ErrorNote(what=self._name, kind="unreadable", message=message))


def _words(shape: tuple[int, ...], dtype: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


# -- the layout: a folder's own checkpoint, and those that accelerate puts into inner folders --

_SAVED_APART = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""Folders where accelerate (and the Trainer through it) puts the model and the optimizer of an FSDP run."""

_DATA = ".distcp"

_Refusal = tuple[str, CheckpointError]
"""A file, and why it cannot be read."""


def _claims(name: str) -> bool:
    return name.endswith((METADATA, _DATA)) or _SAVED_APART.fullmatch(name) is not None


def _read(into: CheckpointBuilder, level: FolderState, names: Sequence[str]) -> None:
    """Open the distributed checkpoints of a folder; refusals are reported after what is missing."""
    folders = ["", *(name for name in names if name in level.listing.folders and _SAVED_APART.fullmatch(name))]
    refused = [_add(into, level, inner, names) for inner in folders]
    for refusal in filter(None, refused):
        into.refuse(*refusal)


def _add(into: CheckpointBuilder, level: FolderState, inner: str, names: Sequence[str]) -> _Refusal | None:
    """Open the distributed checkpoint of the folder, or of the folder `inner` in it."""
    folder, below = level.path / inner, f"{level.prefix}{inner}/" if inner else level.prefix
    if inner:
        try:
            names = list_folder(folder).names
        except CheckpointError as error:
            return level.prefix + inner, error
    data = [name for name in names if name.endswith(_DATA)]
    if METADATA not in names or is_folder(folder / METADATA):
        if data:
            message = (
                f"{below}{METADATA} is missing: nothing says what lies in {_some(data)}. It is written last: the save "
                "was interrupted, or each rank described its own pieces, which is not read."
            )
            into.lack(below + METADATA, message)
            into.refusals.append(CheckpointError(message))
        return None
    if not inner:
        level.unit = level.prefix + METADATA
    try:
        part, errors = read_distributed(folder, below)
    except CheckpointError as error:
        return below + METADATA, error
    part.index = "" if inner else level.unit
    into.parts.append(part)
    into.errors += errors
    used = {file.path.name for file in part.beside}
    level.taken.update(used if not inner else ())
    told = {error.what for error in errors}
    left = [name for name in data if name not in used and below + name not in told]
    if left:
        into.remarks.append(f"{below}{METADATA} puts nothing into {_some(left)}: not part of this checkpoint")
    return None


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more files" if len(names) > 1 else "")


DISTRIBUTED = Layout(name="", claims=_claims, read=_read)
