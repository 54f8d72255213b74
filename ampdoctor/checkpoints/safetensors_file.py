"""The `.safetensors` format, with our own header parse: the format is a length, a JSON object and raw bytes.

The library's reader maps the file (a file that shrinks kills the process with SIGBUS) or holds a whole tensor. Reading
slices into one buffer needs the offsets, and the offsets need the checks below. They are the library's checks (its
tests are the oracle of ours), plus the refusal of duplicate keys, which the library accepts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.checkpoints.files import ByteSource, shown
from ampdoctor.checkpoints.json_files import parse_json
from ampdoctor.checkpoints.pickled_objects import MAX_PATH
from ampdoctor.checkpoints.stored_tensor import (
    MAX_DIMENSIONS,
    StoredTensor,
    StridedTensor,
    contiguous_stride,
    unread_dtype,
)
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.json_records import DuplicateKeyError
from ampdoctor.evidence.report import Skipped
from ampdoctor.numerics.tensors import E8M0

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; `parse_json` refuses most headers close to it."""
MAX_TENSORS = 250_000
"""The largest published models have fewer than 100,000 tensors."""

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    **dict(zip(("F8_E8M0",), E8M0, strict=False)),
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class SafetensorsContent:
    """The contents of a header."""

    tensors: dict[str, StoredTensor]  # readable ones in the order of their bytes
    skipped: tuple[Skipped, ...]  # of a dtype that is not read
    names: frozenset[str]  # all names, skipped ones too
    metadata: dict[str, str]  # the header's `__metadata__`: notes beside the tensors


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def looks_like_safetensors(head: bytes) -> bool:
    """Whether a file starts like this format: a plausible length, then an opening brace."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40


def read_safetensors(file: ByteSource) -> SafetensorsContent:
    """Parse and check the header, which must describe every byte of the file once; no tensor data are read."""
    if file.size < 8:
        raise CheckpointError(f"{file.name} is truncated: {file.size} bytes cannot hold a safetensors header.")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of the safetensors header", MAX_HEADER_BYTES, length)
    if 8 + length > file.size:
        raise CheckpointError(
            f"{file.name} is truncated: its header needs {8 + length} bytes and the file has {file.size}."
        )
    header = _parse(file, length)
    metadata = header.get("__metadata__", {})
    entries = _entries(header, file.name)
    _check_layout(entries, file.size - 8 - length, file.name)
    tensors: dict[str, StoredTensor] = {}
    skipped: list[Skipped] = []
    for entry in entries:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            skipped.append(unread_dtype(entry.dtype, entry.name, f" in {file.name}"))
            continue
        if 0 in entry.shape and math.prod(size or 1 for size in entry.shape) >= 2**63:  # its strides would overflow
            raise CheckpointError(f"{file.name}: the sizes of tensor {shown(entry.name)} overflow; refused.")
        if math.prod(entry.shape) * dtype.itemsize != entry.end - entry.begin:
            raise CheckpointError(
                f"{file.name}: tensor {shown(entry.name)} has {entry.end - entry.begin} bytes, but its shape and dtype "
                f"need {math.prod(entry.shape) * dtype.itemsize}."
            )
        tensors[entry.name] = StridedTensor(
            file=file,
            offset=8 + length + entry.begin,
            storage_bytes=entry.end - entry.begin,
            dtype=dtype,
            shape=entry.shape,
            stride=contiguous_stride(entry.shape),
        )
    return SafetensorsContent(tensors, tuple(skipped), frozenset(e.name for e in entries), metadata)


def _parse(file: ByteSource, length: int) -> dict[str, Any]:
    try:
        header = parse_json(file.read(8, length), f"{file.name}: the safetensors header", strict=True)
    except DuplicateKeyError as error:
        raise CheckpointError(
            f"{file.name}: the safetensors header has the key {shown(error.key)} twice; refused."
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{file.name}: the safetensors header is not valid JSON ({type(error).__name__})."
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name}: the safetensors header is not a JSON object.")
    return header


def _entries(header: dict[str, Any], name: str) -> list[_Entry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{name}: __metadata__ of the safetensors header is not a table of strings.")
    if len(header) > MAX_TENSORS:
        raise LimitExceededError(f"{name}: tensors", MAX_TENSORS, len(header))
    entries = [_entry(key, value, name) for key, value in header.items()]
    return sorted(entries, key=lambda e: (e.begin, e.end))


def _entry(key: str, value: Any, file: str) -> _Entry:
    bad = CheckpointError(f"{file}: the header's entry for tensor {shown(key)} is malformed.")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise bad
    if len(shape) > MAX_DIMENSIONS or len(key) > MAX_PATH:
        raise LimitExceededError(
            f"{file}: dimensions or characters of the name of tensor {shown(key)}",
            MAX_DIMENSIONS if len(shape) > MAX_DIMENSIONS else MAX_PATH,
            len(shape) if len(shape) > MAX_DIMENSIONS else len(key),
        )
    return _Entry(key, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_layout(entries: list[_Entry], available: int, name: str) -> None:
    """The format's rule: tensors fill the data section one after the other, without overlap, hole or rest."""
    position = 0
    for entry in entries:
        if entry.end < entry.begin:
            raise CheckpointError(f"{name}: tensor {shown(entry.name)} ends before it begins.")
        if entry.begin != position:
            what = "overlaps another" if entry.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{name}: tensor {shown(entry.name)} {what}; refused.")
        position = entry.end
    if position > available:
        raise CheckpointError(f"{name} is truncated: its tensors need {position} bytes and {available} are there.")
    if position < available:
        raise CheckpointError(f"{name} has {available - position} bytes that belong to no tensor; refused.")
