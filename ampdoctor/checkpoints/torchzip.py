"""The zip format of `torch.save`: own zip checks, structure through torch's restricted unpickler, data by position.

`torch.load(map_location="meta", weights_only=True)` gives the structure without data: every storage comes back with its
byte position in the file. The data are then read by us in bounded memory. `mmap=True` would be as quick, but reads a
neighbour's bytes where a record is shorter than the pickle claims, and garbage where a record is compressed (both
measured); here such a file is refused before any byte of it is counted.

A refusal by the restricted unpickler is final: loading again without the restriction would let the file choose to run
its own code.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.stored import StoredTensor
from ampdoctor.errors import AmpdoctorError, CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

MAX_MEMBERS = 1_000_000
"""Zip members; one per storage."""
MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""Of `data.pkl`; a model with 100,000 tensors needs about 20 MB."""
MAX_DEPTH = 200
"""Nesting of dicts and lists inside a checkpoint."""

Tree = Any
"""Dicts, lists, tuples, plain values, and `StoredTensor` or `Skipped` in place of tensors."""

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_torch_zip(file: RegularFile) -> Tree:
    """The object that was saved, with a `StoredTensor` for each strided tensor; no tensor data are read.

    Raises:
        CheckpointError: The zip is corrupted, not written by `torch.save`, or asks for something that is never run.
        LimitExceededError: A part is larger than a checkpoint needs.
    """
    records = _records(file)
    try:
        with file.duplicate() as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on beta layouts and old storages are not for our user
            saved = torch.load(stream, map_location="meta", weights_only=True)
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
    return _Replacer(file, records).replace(saved, 0)


def _records(file: RegularFile) -> dict[int, int]:
    """Byte position -> length of every stored record, once two readers cannot see two different files in it."""
    try:
        with file.duplicate() as stream, zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except (
        zipfile.BadZipFile,
        EOFError,
        struct.error,
        UnicodeDecodeError,
        OverflowError,
        NotImplementedError,
        ValueError,
    ):
        raise CheckpointError(
            f"{file.name} is truncated or corrupted: it starts as a zip file, but its directory cannot be read."
        ) from None
    if len(members) > MAX_MEMBERS:
        raise LimitExceededError(f"{file.name}: zip members", MAX_MEMBERS, len(members))
    _require_torch_layout([m.filename for m in members], file.name)
    records: dict[int, int] = {}
    end = 0
    for member in sorted(members, key=lambda m: m.header_offset):
        if (
            member.compress_type != zipfile.ZIP_STORED
            or member.compress_size != member.file_size
            or member.flag_bits & 0x1
        ):
            raise CheckpointError(
                f"{file.name}: record {member.filename!r} is compressed or encrypted, which torch.save never does; "
                "refused."
            )
        if member.header_offset < end:
            raise CheckpointError(f"{file.name}: record {member.filename!r} overlaps another; refused.")
        start = _data_start(file, member)
        end = start + member.file_size
        if end > file.size:
            raise CheckpointError(f"{file.name} is truncated: record {member.filename!r} passes the end of the file.")
        if member.filename.endswith("/data.pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise LimitExceededError(f"{file.name}: bytes of data.pkl", MAX_PICKLE_BYTES, member.file_size)
        if member.filename.endswith("/byteorder") and file.read(start, min(member.file_size, 16)) != b"little":
            raise CheckpointError(f"{file.name} was written on a big-endian machine, which is not read.")
        records[start] = member.file_size
    return records


def _require_torch_layout(names: list[str], file: str) -> None:
    if len(set(names)) < len(names):
        raise CheckpointError(
            f"{file} holds two records of the same name; refused, because readers disagree on which one counts."
        )
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") or name.split("/", 2)[1:2] == ["code"] for name in names):
        raise CheckpointError(
            f"{file} is a TorchScript archive, which holds a program; save model.state_dict() instead."
        )
    if not pickles:
        raise CheckpointError(f"{file} is a zip file, but was not written by torch.save.")
    if len(pickles) > 1:
        raise CheckpointError(
            f"{file} holds {len(pickles)} data.pkl; refused, because readers disagree on which one counts."
        )


def _data_start(file: RegularFile, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin, from its local header, which must tell the same story as the directory."""
    mismatch = CheckpointError(
        f"{file.name} is corrupted: the local header of record {member.filename!r} contradicts the zip's directory."
    )
    if member.header_offset + _LOCAL_HEADER.size > file.size:
        raise mismatch
    magic, _, _, method, _, _, _, _, _, name_length, extra_length = _LOCAL_HEADER.unpack(
        file.read(member.header_offset, _LOCAL_HEADER.size)
    )
    name_at = member.header_offset + _LOCAL_HEADER.size
    if magic != b"PK\x03\x04" or method != zipfile.ZIP_STORED or name_at + name_length > file.size:
        raise mismatch
    if file.read(name_at, name_length) not in {
        member.orig_filename.encode("utf-8", "replace"),
        member.orig_filename.encode("cp437", "replace"),
    }:
        raise mismatch
    return int(name_at + name_length + extra_length)


class _Replacer:
    """Walks what torch returned and puts a checked `StoredTensor` in place of each meta tensor."""

    def __init__(self, file: RegularFile, records: dict[int, int]) -> None:
        self._file = file
        self._records = records
        self._open: set[int] = set()

    def replace(self, node: Any, depth: int) -> Tree:
        if isinstance(node, torch.Tensor):
            return self._tensor(node)
        if not isinstance(node, dict | list | tuple | set | frozenset):
            return node
        if depth > MAX_DEPTH:
            raise LimitExceededError(f"{self._file.name}: nesting", MAX_DEPTH, depth)
        if id(node) in self._open:
            raise CheckpointError(f"{self._file.name} is refused: a container in it contains itself.")
        self._open.add(id(node))
        if isinstance(node, dict):
            out: Tree = {key: self.replace(value, depth + 1) for key, value in node.items()}
        else:
            build: Callable[..., Any] = list if isinstance(node, list) else tuple
            out = build(self.replace(value, depth + 1) for value in node)
        self._open.discard(id(node))
        return out

    def _tensor(self, tensor: torch.Tensor) -> StoredTensor | Skipped:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return Skipped(what="", reason="a sparse, nested or quantised tensor is not read")
        try:
            storage = tensor.untyped_storage()
            stored = StoredTensor(
                file=self._file,
                offset=storage._checkpoint_offset or 0,  # noqa: SLF001 - where torch says the record begins
                storage_bytes=storage.nbytes(),
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                start=int(tensor.storage_offset()),
            )
        except (AmpdoctorError, AttributeError, RuntimeError, NotImplementedError):
            return Skipped(what="", reason="a tensor without plain storage is not read")
        if stored.storage_bytes and self._records.get(stored.offset) != stored.storage_bytes:
            raise CheckpointError(
                f"{self._file.name} is corrupted: a tensor claims {stored.storage_bytes} bytes "
                "and its record has another length."
            )
        if not stored.within_storage():
            raise CheckpointError(
                f"{self._file.name} is corrupted: a tensor of shape {stored.shape} reaches outside its own storage."
            )
        return stored
