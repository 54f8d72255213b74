"""The zip format of `torch.save`: structure through torch's restricted unpickler, data by position.

torch never opens the file itself. It is handed a zip made here, with the file's `data.pkl` and a record of one byte
for each storage, and loads that with `map_location="meta"` and `weights_only=True`: the structure without data, each
storage with the position of its record. The data are then read by us, in bounded memory, from the record of that name
in the file.

Why not more simply: on the file itself torch computes positions from the order in which `torch.save` writes instead of
looking them up (seen in 2.13), so a zip that another tool wrote again gives one tensor another's bytes; and `mmap=True`
reads a neighbour's bytes where a record is shorter than the pickle claims, and garbage where one is compressed.

A refusal by the restricted unpickler is final: loading again without the restriction would let the file choose to run
its own code.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.stored import StoredTensor
from ampdoctor.checkpoints.zip_records import Records, read_records
from ampdoctor.errors import AmpdoctorError, CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

MAX_DEPTH = 200
"""Nesting of dicts and lists inside a checkpoint."""
MAX_NODES = 5_000_000
"""Dicts, lists, tensors and plain values of a checkpoint, what is shared counted at each of its places: so many are
visited by every later walk. An optimizer over 100,000 parameters has about 600,000."""

Tree = Any
"""Dicts, lists, tuples, plain values, and `StoredTensor` or `Skipped` in place of tensors."""

_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26
_LENGTHS = struct.Struct("<2H")
"""Of name and extra field, at the end of a zip's local header; the record follows them."""
_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")
_ALLOCATES = re.compile(rb"c(?:builtins|__builtin__)\nbytearray\n")
"""The one callable that torch's unpickler allows and that fills as much memory as its argument says."""
_NOT_READ = "a sparse, nested or quantised tensor is not read"
_UNBUILT = {
    b"ctorch._utils\n_rebuild_qtensor\n": b"ctorch._utils\n_unread__qtensor\n",
    b"ctorch._utils\n_rebuild_nested_tensor\n": b"ctorch._utils\n_unread__nested_tensor\n",
}
"""What torch cannot build without data, and a name of the same length under which it gets a `_Unread` in its place."""


class _Unread:
    """Stands for a quantised or nested tensor, whatever it would be built from."""

    def __init__(self, *_parts: object) -> None:
        """Forget the parts."""


def read_torch_zip(file: RegularFile) -> Tree:
    """The object that was saved, with a `StoredTensor` for each strided tensor; no tensor data are read.

    Raises:
        CheckpointError: The zip is corrupted, not written by `torch.save`, or asks for something that is never run.
        LimitExceededError: A part is larger than a checkpoint needs.
    """
    records = read_records(file)
    if _ALLOCATES.search(records.pickle):
        raise CheckpointError(
            f"{file.name} is refused: its pickle makes a bytearray, which may be of any size; save tensors and plain "
            "Python values only."
        )
    outline, storages = _outline(records)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on beta layouts and old storages are not for our user
            names = [new[1:-1].decode().replace("\n", ".") for new in _UNBUILT.values()]
            with torch.serialization.safe_globals([(_Unread, name) for name in names]):
                saved = torch.load(outline, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _UNSAFE_GLOBAL.search(str(error))
        wants = (
            f"asks for {found[1].rstrip('.,')!r}" if found else "asks for something other than tensors and plain values"
        )
        raise CheckpointError(
            f"{file.name} is refused: its pickle {wants}, which ampdoctor never imports or runs; "
            "save tensors and plain Python values only."
        ) from None
    except (MemoryError, RecursionError):
        raise CheckpointError(
            f"{file.name} is refused: its pickle needs more memory or nesting than a checkpoint does."
        ) from None
    except Exception as error:  # noqa: BLE001 - torch raises bare RuntimeError, KeyError, TypeError, ... on a malformed file
        raise CheckpointError(
            f"{file.name} is corrupted: its structure cannot be read ({type(error).__name__})."
        ) from None
    return _Replacer(file, storages).replace(saved)


def _outline(records: Records) -> tuple[io.BytesIO, dict[int, tuple[int, int]]]:
    """A zip for torch with the structure alone, and from where its records lie there to where they lie in the file."""
    pickled = records.pickle
    for name, unbuilt in _UNBUILT.items():
        pickled = pickled.replace(name, unbuilt)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("outline/data.pkl", pickled)
        archive.writestr("outline/version", records.version or b"3")
        archive.writestr("outline/byteorder", b"little")
        for key in records.storages:
            archive.writestr(f"outline/data/{key}", b"-")  # one byte, so that no two records begin at one place
        headers = {key: archive.getinfo(f"outline/data/{key}").header_offset for key in records.storages}
    content = made.getvalue()
    places: dict[int, tuple[int, int]] = {}
    for key, at in headers.items():
        name_length, extra_length = _LENGTHS.unpack_from(content, at + _LENGTHS_AT)
        places[at + _LOCAL_HEADER_BYTES + name_length + extra_length] = records.storages[key]
    made.seek(0)
    return made, places


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A finished container.

    Attributes:
        tree: What stands in its place.
        height: Levels of containers in it, itself included.
        nodes: Everything in it, what is shared counted at each of its places.
    """

    tree: Tree
    height: int = 0
    nodes: int = 1


class _Replacer:
    """Walks what torch returned and puts a checked `StoredTensor` in place of each meta tensor.

    A container that several others hold is walked once and stays one object: 60 levels of `x = [x, x]` are 60 lists.
    """

    def __init__(self, file: RegularFile, storages: Mapping[int, tuple[int, int]]) -> None:
        self._file = file
        self._storages = storages
        self._open: set[int] = set()
        self._done: dict[int, _Replaced] = {}

    def replace(self, root: Any) -> Tree:
        """The tree of `root`, which must stay alive meanwhile: finished containers are known by their address."""
        return self._replaced(root, 0).tree

    def _replaced(self, node: Any, depth: int) -> _Replaced:
        if isinstance(node, torch.Tensor):
            return _Replaced(self._tensor(node))
        if isinstance(node, _Unread):
            return _Replaced(Skipped(what="", reason=_NOT_READ))
        if not isinstance(node, dict | list | tuple | set | frozenset):
            return _Replaced(node)
        done = self._done.get(id(node))
        if done is None:
            done = self._container(node, depth)
            self._done[id(node)] = done
        if depth + done.height > MAX_DEPTH:
            raise LimitExceededError(f"{self._file.name}: nesting", MAX_DEPTH, depth + done.height)
        return done

    def _container(self, node: Any, depth: int) -> _Replaced:
        if depth >= MAX_DEPTH:
            raise LimitExceededError(f"{self._file.name}: nesting", MAX_DEPTH, depth + 1)
        if id(node) in self._open:
            raise CheckpointError(f"{self._file.name} is refused: a container in it contains itself.")
        self._open.add(id(node))
        height, nodes = 0, 1
        values: list[Tree] = []
        for value in node.values() if isinstance(node, dict) else node:
            part = self._replaced(value, depth + 1)
            values.append(part.tree)
            height, nodes = max(height, part.height), nodes + part.nodes
            if nodes > MAX_NODES:
                raise LimitExceededError(f"{self._file.name}: values", MAX_NODES, nodes)
        self._open.discard(id(node))
        if isinstance(node, dict):
            return _Replaced(dict(zip(node, values, strict=True)), height + 1, nodes)
        return _Replaced(values if isinstance(node, list) else tuple(values), height + 1, nodes)

    def _tensor(self, tensor: torch.Tensor) -> StoredTensor | Skipped:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return Skipped(what="", reason=_NOT_READ)
        try:
            storage = tensor.untyped_storage()
            claimed = storage.nbytes()
            record = storage._checkpoint_offset  # noqa: SLF001 - where its record begins
            if record is None:
                return Skipped(what="", reason="a tensor on the meta device has no data")
            place = self._storages.get(record)
            offset, length = place or (0, -1)
            stored = StoredTensor(
                file=self._file,
                offset=offset,
                storage_bytes=length,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                start=int(tensor.storage_offset()),
            )
        except (AmpdoctorError, AttributeError, RuntimeError):
            return Skipped(what="", reason="a tensor without plain storage is not read")
        if length != claimed:
            raise CheckpointError(
                f"{self._file.name} is corrupted: a tensor claims {claimed} bytes and its record has another length."
            )
        if not stored.within_storage():
            raise CheckpointError(
                f"{self._file.name} is corrupted: a tensor of shape {stored.shape} reaches outside its own storage."
            )
        return stored
