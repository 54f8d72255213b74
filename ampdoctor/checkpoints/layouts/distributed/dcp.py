"""The format of `torch.distributed.checkpoint` (DCP): a `.metadata`, and files that hold many small `torch.save` zips.

We have a reader of our own because torch's executes the pickle in `.metadata`, joins the paths in it unchecked, loads
objects without restriction, and wants the tensors allocated before it reads. FSDP2, torchtitan, Lightning, Accelerate
and Megatron all write the format (`dcp_tree` has the differences).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.contents.structure import Sections
from ampdoctor.checkpoints.formats.safetensors_file import SafetensorsContent, looks_like_safetensors, read_safetensors
from ampdoctor.checkpoints.formats.torchzip import read_torch_zip
from ampdoctor.checkpoints.layouts.distributed.dcp_metadata import (
    METADATA,
    RANK_METADATA,
    DistributedMetadata,
    Piece,
    Place,
    TensorPlan,
    joined,
    read_metadata,
)
from ampdoctor.checkpoints.layouts.distributed.dcp_tree import sections_of
from ampdoctor.checkpoints.layouts.distributed.tiling import TilingBudget, misfit
from ampdoctor.checkpoints.pickles.inert import Inert
from ampdoctor.checkpoints.pickles.tree import Saved
from ampdoctor.checkpoints.storage.files import ByteSource, RegularFile, Window, is_folder
from ampdoctor.checkpoints.storage.pooled_files import FilePool, PooledFile
from ampdoctor.checkpoints.storage.stored import Shard, ShardedTensor, StoredTensor, StridedTensor, unread, unread_dtype
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote, Skipped

_AHEAD = 2048
"""Bytes that are read at once from each end of an entry; `torch.save` of one tensor takes about 1,500 besides data."""
MAX_NOTES = 20
"""Unreadable entries that are named one by one; the others are counted."""


@dataclass(slots=True)
class DistributedContent:
    """The contents of a distributed checkpoint.

    Attributes:
        file: The open `.metadata`.
        beside: The open files that hold the bytes.
        sections: The parts.
        errors: What should be there and is not.
        remarks: Harmless oddities.
    """

    file: RegularFile
    beside: tuple[RegularFile, ...] = ()
    sections: Sections = field(default_factory=Sections)
    errors: list[ErrorNote] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def metadata_in(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the names that describe a folder's distributed checkpoint: `.metadata`, or one file per rank."""
    if METADATA in names:
        return [] if is_folder(folder / METADATA) else [METADATA]
    ranks = [match for name in names if (match := RANK_METADATA.fullmatch(name))]
    return [match[0] for match in sorted(ranks, key=lambda match: int(match[1]))]


def read_distributed(folder: Path, names: Sequence[str], prefix: str = "") -> DistributedContent:
    """Read the structure of a distributed checkpoint; no tensor data are read.

    Args:
        folder: Where its metadata are.
        names: The files that are its metadata (`metadata_in`), at least one.
        prefix: What stands before the names of its files in reports ("optimizer_0/").

    Raises:
        CheckpointError: The metadata cannot be read or contradict themselves, or none of their files can be read.
        LimitExceededError: It asks for more than a safe bound.
    """
    reading = _Reading(folder, names[0], prefix)
    files: list[RegularFile] = []
    try:
        described = []
        for name in names:
            files.append(RegularFile(folder / name, prefix + name))
            described.append(read_metadata(files[-1]))
        content = reading.content(described[0] if len(described) == 1 else joined(described, files[0].name), files)
    except BaseException:
        for file in (*files, *reading.files.values()):
            file.close()
        raise
    return content


class _ReadAhead(ByteSource):
    """Holds the ends of an entry in memory: its zip is read in a dozen small steps, nearly all of them there."""

    def __init__(self, window: Window) -> None:
        self.name = window.name
        self.size = window.size
        self.origin = window.origin
        self._window = window
        self._head = window.read(0, min(window.size, _AHEAD))
        self._tail_at = max(window.size - _AHEAD, 0)
        self._tail = window.read(self._tail_at, window.size - self._tail_at) if self._tail_at else self._head

    def read_into(self, offset: int, target: memoryview) -> None:
        end = offset + len(target)
        if end <= len(self._head):
            target[:] = self._head[offset:end]
        elif self._tail_at <= offset and end <= self.size:
            target[:] = self._tail[offset - self._tail_at : end - self._tail_at]
        else:
            self._window.read_into(offset, target)


class _Unreadable(Exception):  # noqa: N818 - not an error: it is reported once for each file
    """An entry lies in a file whose error has been reported."""


class _Reading:
    """Opens one checkpoint.

    Attributes:
        files: The data files that could be opened, by name.
    """

    def __init__(self, folder: Path, name: str, prefix: str) -> None:
        self.files: dict[str, PooledFile] = {}
        self._pool = FilePool()
        self._budget = TilingBudget()
        self._folder = folder
        self._name = prefix + name
        self._prefix = prefix
        self._errors: list[ErrorNote] = []
        self._bad: list[tuple[str, str]] = []
        self._foreign: dict[str, None] = {}
        self._tables: dict[str, SafetensorsContent] = {}
        self._served: set[tuple[str, str]] = set()

    def content(self, described: DistributedMetadata, files: list[RegularFile]) -> DistributedContent:
        plans, objects = described.tensors.values(), described.objects.values()
        places = [piece.place for plan in plans for piece in plan.pieces]
        self._open([place for place in (*places, *objects) if place is not None])
        self._foreign.update(dict.fromkeys(described.foreign))
        values: dict[str, Any] = {}
        for name in described.order:
            plan = described.tensors.get(name)
            try:
                values[name] = self._object(described.objects[name]) if plan is None else self._tensor(name, plan)
            except _Unreadable:
                continue
            except CheckpointError as error:
                self._bad.append((name, str(error)))
        self._tell_bad()
        if not values and self._errors:
            raise CheckpointError(self._errors[0].message)
        remarks = []
        if described.unused:
            remarks.append(f"{self._name} tells of {described.unused} places that belong to no entry of it")
        sections = sections_of(values, described.paths, tuple(self._foreign), self._name)
        unlisted = {
            f"{file}.{key}": stored
            for file, table in self._tables.items()
            for key, stored in table.tensors.items()
            if (file, key) not in self._served
        }
        if unlisted:
            sections.others.update(unlisted)
            remarks.append(f"{self._name} does not tell of {len(unlisted)} tensors in its files, as {min(unlisted)!r}")
        sections.ordered = len(self.files) == 1  # the plans of several ranks are joined one after the other
        return DistributedContent(files[0], (*files[1:], *self.files.values()), sections, self._errors, remarks)

    def _open(self, places: Iterable[Place]) -> None:
        """Open every named file, and check the places against its size and against each other."""
        by_file: dict[str, list[Place]] = {}
        for place in places:
            by_file.setdefault(place.file, []).append(place)
        for name, wanted in sorted(by_file.items()):
            shown = self._prefix + name
            try:
                file = PooledFile(self._folder / name, shown, self._pool)
            except CheckpointError as error:
                kind = "unreadable" if os.path.lexists(self._folder / name) else "missing"
                message = f"{self._name} puts {len(wanted)} entries into this file: {error}"
                self._errors.append(ErrorNote(what=shown, kind=kind, message=message))
                continue
            self.files[name] = file
            if looks_like_safetensors(file.head(16)):
                self._tables[name] = read_safetensors(file)
                continue
            self._require_apart(wanted)
            end = max(place.offset + place.length for place in wanted)
            if end > file.size:
                message = f"{shown} is truncated: {self._name} puts {end} bytes into it and it has {file.size}."
                self._errors.append(ErrorNote(what=shown, kind="truncated", message=message))

    def _require_apart(self, places: list[Place]) -> None:
        end = 0
        for place in sorted(places, key=lambda place: place.offset):
            if place.offset < end:
                raise CheckpointError(
                    f"{self._name} is refused: two of its entries share bytes of {self._prefix}{place.file}."
                )
            end = place.offset + place.length

    def _window(self, place: Place | None) -> Window:
        if place is None:
            raise CheckpointError("it is described, but nothing says where it lies")
        file = self.files.get(place.file)
        if file is None or place.offset + place.length > file.size:
            raise _Unreadable
        return Window(file, place.offset, place.length)

    def _object(self, place: Place | None) -> Any:
        """Returns a Python object that was saved beside the tensors, with the tensors inside it."""
        window = self._window(place)
        if place is not None and place.transforms:
            return unread(_transformed(place))
        saved = self._saved(window)
        self._foreign.update(dict.fromkeys(saved.foreign))
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
            stored = self._piece(name, piece)
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
        return ShardedTensor(dtype=plan.dtype, shape=plan.shape, shards=tuple(shards))

    def _piece(self, name: str, piece: Piece) -> StridedTensor | Skipped:
        place = piece.place
        if place is not None and place.file in self._tables:
            content = self._tables[place.file]
            found: Any = content.tensors.get(name)
            if found is None:
                raise CheckpointError(f"{self._prefix}{place.file} does not hold it")
            if (place.file, name) in self._served:
                raise CheckpointError(f"two pieces of it are said to be the one slice in {self._prefix}{place.file}")
            self._served.add((place.file, name))
        else:
            window = self._window(place)
            if place is not None and place.transforms:
                return unread(_transformed(place))
            saved = self._saved(window)
            self._foreign.update(dict.fromkeys(saved.foreign))
            found = saved.tree
        if isinstance(found, StridedTensor | Skipped):
            return found
        kind = found.name[:80] if isinstance(found, Inert) else type(found).__name__
        return unread(f"a tensor that was saved as {kind} is not read")

    def _saved(self, window: Window) -> Saved:
        ahead = _ReadAhead(window)
        if not ahead.head(4).startswith(b"PK\x03\x04"):
            raise CheckpointError(f"what lies at byte {window.origin} of {window.name} was not written by torch.save")
        return read_torch_zip(window, ahead)

    def _tell_bad(self) -> None:
        for name, why in self._bad[:MAX_NOTES]:
            message = f"{name[:200]!r} cannot be read: {why.rstrip('.')}."
            self._errors.append(ErrorNote(what=name[:200], kind="unreadable", message=message))
        rest = len(self._bad) - MAX_NOTES
        if rest > 0:
            message = f"{rest} more entries of {self._name} cannot be read."
            self._errors.append(ErrorNote(what=self._name, kind="unreadable", message=message))


def _transformed(place: Place) -> str:
    return f"its bytes were written through {', '.join(place.transforms)}, which is not read"


def _words(shape: tuple[int, ...], dtype: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
