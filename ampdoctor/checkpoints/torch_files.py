"""Files written by torch.save, as a zip or in the older format, and detection of a file's format."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ampdoctor.checkpoints.files import ByteSource, RegularFile, shown
from ampdoctor.checkpoints.pickled_objects import Saved, require_finite_tree
from ampdoctor.checkpoints.safetensors_file import looks_like_safetensors
from ampdoctor.checkpoints.torch_objects import StorageRef, TensorBuilder
from ampdoctor.checkpoints.unpickler import MAX_PICKLE_BYTES, SafeUnpickler
from ampdoctor.errors import CheckpointError, LimitExceededError, OtherFormatError

MAX_MEMBERS = 250_000
"""One per storage: more tensors than a pickle of the permitted length can describe."""
MAX_DIRECTORY_BYTES = 32 * 1024 * 1024
"""A member takes 46 bytes and its name."""

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_LONGEST_COMMENT = 0xFFFF
_FULL = 0xFFFFFFFF
"""A full 32-bit field: its value is in the 64-bit field."""

_SIZES_BEHIND = 0x0008
"""Flag: the local header may leave checksum and sizes at 0, because they follow the data."""
_UTF8 = 0x0800
_CHANGED = 0x0001 | 0x0020 | 0x0040 | 0x2000
"""Flags: encrypted, a patch, strongly encrypted, headers masked."""


@dataclass(frozen=True, slots=True)
class _Entry:
    raw_name: bytes
    name: str
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    header: int


def _directory(file: ByteSource) -> dict[str, tuple[int, int, int]]:
    """Returns position, size and checksum of a zip's members, in order; refuses what readers could disagree on."""
    offset, size, count = _end(file)
    if count > MAX_MEMBERS:
        raise LimitExceededError(f"{file.name}: zip members", MAX_MEMBERS, count)
    if size > MAX_DIRECTORY_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of the zip's directory", MAX_DIRECTORY_BYTES, size)
    entries = list(_entries(file, file.read(offset, size), count))
    if len({entry.name.lower() for entry in entries}) < len(entries):  # torch ignores case when it looks them up
        raise CheckpointError(
            f"{file.name} holds two records of the same name; refused, because readers disagree on which one counts."
        )
    starts: dict[int, int] = {}
    end = 0
    for entry in sorted(entries, key=lambda e: e.header):
        if entry.method != 0 or entry.packed != entry.size or entry.flags & _CHANGED:
            raise CheckpointError(
                f"{file.name}: record {shown(entry.name)} is compressed or encrypted, which torch.save never does; "
                "refused."
            )
        if entry.header < end:
            raise CheckpointError(f"{file.name}: record {shown(entry.name)} overlaps another; refused.")
        start = _data_start(file, entry, offset)
        end = start + entry.size
        if end > offset:
            raise CheckpointError(f"{file.name} is truncated: record {shown(entry.name)} passes the end of the data.")
        starts[entry.header] = start
    return {entry.name: (starts[entry.header], entry.size, entry.crc) for entry in entries}


def _unreadable(file: ByteSource) -> CheckpointError:
    return CheckpointError(
        f"{file.name} is truncated or corrupted: it starts as a zip file, but its directory cannot be read."
    )


def _end(file: ByteSource) -> tuple[int, int, int]:
    """Position and length of the directory, and its number of members; it must end right before the end records."""
    tail_size = min(file.size, _END.size + _LONGEST_COMMENT)
    tail = file.read(file.size - tail_size, tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise _unreadable(file)
    _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail) or disk or first_disk or here != count:
        raise _unreadable(file)
    ends = file.size - len(tail) + at
    locator = file.read(ends - _LOCATOR.size, _LOCATOR.size) if ends >= _LOCATOR.size + _END64.size else b""
    if locator.startswith(b"PK\x06\x07"):
        _, disk, ends64, disks = _LOCATOR.unpack(locator)
        if disk or disks != 1 or ends64 + _END64.size + _LOCATOR.size != ends:
            raise _unreadable(file)
        magic, length, _, _, disk, first_disk, here, count64, size64, offset64 = _END64.unpack(
            file.read(ends64, _END64.size)
        )
        short = (count, size, offset)
        long = (count64, size64, offset64)
        told = all(a in {b, full} for a, b, full in zip(short, long, (0xFFFF, _FULL, _FULL), strict=True))
        if magic != b"PK\x06\x06" or length != _END64.size - 12 or disk or first_disk or here != count64 or not told:
            raise _unreadable(file)
        (count, size, offset), ends = long, ends64
    if offset + size != ends:
        raise _unreadable(file)
    return offset, size, count


def _entries(file: ByteSource, directory: bytes, count: int) -> Iterator[_Entry]:
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory):
            raise _unreadable(file)
        magic, _, _, flags, method, _, _, crc, packed, size, names, extras, comments, disk, _, _, header = (
            _CENTRAL.unpack_from(directory, at)
        )
        extra_at = at + _CENTRAL.size + names
        end = extra_at + extras + comments
        if magic != b"PK\x01\x02" or disk or end > len(directory):
            raise _unreadable(file)
        raw = directory[at + _CENTRAL.size : extra_at]
        if _FULL in {packed, size, header}:
            size, packed, header = _widened(directory[extra_at : extra_at + extras], (size, packed, header), file)
        yield _Entry(raw, _decoded(raw, flags, file), flags, method, crc, packed, size, header)
        at = end
    if at != len(directory):
        raise _unreadable(file)


def _widened(extra: bytes, fields: tuple[int, ...], file: ByteSource) -> tuple[int, ...]:
    """Returns fields of 32 bits; full ones are taken from the 64-bit block of the extra data."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            try:
                return tuple(next(wide) if value == _FULL else value for value in fields)
            except RuntimeError:  # fewer numbers than full fields
                break
        at += 4 + length
    raise _unreadable(file)


def _decoded(raw: bytes, flags: int, file: ByteSource) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "latin-1")
    except UnicodeDecodeError:
        raise _unreadable(file) from None
    if not name or "\0" in name or "\\" in name:
        raise CheckpointError(f"{file.name} holds the record {shown(name)}, a name that readers disagree on; refused.")
    return name


def _data_start(file: ByteSource, entry: _Entry, limit: int) -> int:
    """Returns where a member's bytes begin, from its local header, which must agree with the directory."""
    mismatch = CheckpointError(
        f"{file.name} is corrupted: the local header of record {shown(entry.name)} contradicts the zip's directory."
    )
    name_end = entry.header + _LOCAL.size + len(entry.raw_name)
    if name_end > limit:
        raise mismatch
    local = file.read(entry.header, name_end - entry.header)
    magic, _, flags, method, _, _, crc, packed, size, names, extras = _LOCAL.unpack_from(local)
    if (magic, flags, method, names) != (b"PK\x03\x04", entry.flags, entry.method, len(entry.raw_name)):
        raise mismatch
    if local[_LOCAL.size :] != entry.raw_name or name_end + extras > limit:
        raise mismatch
    if _FULL in {packed, size}:
        size, packed = _widened(file.read(name_end, extras), (size, packed), file)
    later = (0,) if flags & _SIZES_BEHIND else ()
    told = ((crc, entry.crc), (packed, entry.packed), (size, entry.size))
    if any(here != there and here not in later for here, there in told):
        raise mismatch
    return int(name_end + extras)


# -- the structure of a `torch.save` zip --

_SMALL = 64
"""Bytes read from a record with a word or a number."""


def _records(file: ByteSource) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Returns `data.pkl`, and the byte position and length of each storage's record by its key."""
    members = _directory(file)
    prefix = _prefix(list(members), file.name)
    at, size, _ = members.get(f"{prefix}/byteorder", (0, 0, 0))
    if file.read(at, min(size, _SMALL)) not in {b"", b"little"}:
        raise CheckpointError(f"{file.name} was written on a big-endian machine, which is not read.")
    at, size, checksum = members[f"{prefix}/data.pkl"]
    if size > MAX_PICKLE_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of data.pkl", MAX_PICKLE_BYTES, size)
    pickle = file.read(at, size)
    if checksum not in {0, zlib.crc32(pickle)}:  # 0: saved without checksums
        raise CheckpointError(f"{file.name} is corrupted: the checksum of its structure is wrong.")
    folder = f"{prefix}/data/"
    storages = {n.removeprefix(folder): (at, size) for n, (at, size, _) in members.items() if n.startswith(folder)}
    return pickle, storages


def _prefix(names: list[str], file: str) -> str:
    """Returns the folder inside the zip that holds everything; torch takes it from the first record."""
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") or name.split("/", 2)[1:2] == ["code"] for name in names):
        raise CheckpointError(
            f"{file} is a TorchScript archive, which holds a program; save model.state_dict() instead."
        )
    if not pickles:
        raise CheckpointError(f"{file} is a zip file, but was not written by torch.save.")
    prefix = pickles[0].removesuffix("/data.pkl")
    if len(pickles) > 1:
        raise CheckpointError(
            f"{file} holds {len(pickles)} data.pkl; refused, because readers disagree on which one counts."
        )
    if not names[0].startswith(f"{prefix}/"):
        raise CheckpointError(
            f"{file} holds records of another folder before its own; refused, because readers disagree on which counts."
        )
    return prefix


# -- the zip format: the inert machine reads the structure, and the data are read by position --
#
# torch's reader computes the positions of records from the order in which `torch.save` writes (2.13), so in a zip that
# another tool rewrote one tensor gets another's bytes, and reads a neighbour's where a record is shorter than claimed.


def read_torch_zip(file: ByteSource) -> Saved:
    """Returns the saved object, with a `StoredTensor` for each strided tensor; no tensor data are read."""
    pickle, storages = _records(file)
    machine = SafeUnpickler(pickle, file.name, TensorBuilder(file, storages))
    tree, _ = machine.run()
    require_finite_tree(tree, file.name)
    return Saved(tree, tuple(machine.unsafe_globals))


# -- the format of `torch.save` before 1.6 (still written with `_use_new_zipfile_serialization=False`) --
#
# Five pickles (magic number, version, facts about the machine, object, keys of its storages), then the storages.

MAGIC = 0x1950A86A20F9469CFC6C
PICKLED_MAGIC = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")
"""The magic number in the file, after the two bytes of the pickle's protocol."""
VERSION = 1001

_LENGTH_BYTES = 8
_OBJECT = 3
"""Position of the object among the five pickles."""


def read_torch_legacy(file: ByteSource) -> Saved:
    """Returns the saved object, with a `StoredTensor` for each strided tensor; no tensor data are read."""
    data = file.head(MAX_PICKLE_BYTES)
    unplaced = TensorBuilder(file, None)
    machine = SafeUnpickler(data, file.name, unplaced)
    position = 0
    parts: list[Any] = []
    starts: list[int] = []
    for at in range(5):
        starts.append(position)
        value, position = machine.run(position)
        parts.append(value if at != _OBJECT else None)  # built again below, with the places of its storages
    magic, version, system, _, keys = parts
    del value
    if magic != MAGIC or version != VERSION:
        raise CheckpointError(f"{file.name} is corrupted: it starts as a file of old torch and goes on otherwise.")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{file.name} was written on a big-endian machine, which is not read.")
    places = _places(file, position, keys, unplaced.storages)
    tree, _ = SafeUnpickler(data, file.name, TensorBuilder(file, places)).run(starts[_OBJECT])
    require_finite_tree(tree, file.name)
    return Saved(tree, tuple(machine.unsafe_globals))


def _places(file: ByteSource, position: int, keys: Any, storages: dict[str, StorageRef]) -> dict[str, tuple[int, int]]:
    """Returns where each storage's bytes are; each is preceded by its length in elements."""
    wrong = CheckpointError(f"{file.name} is corrupted: the list of its storages does not match its tensors.")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise wrong
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        ref = storages.get(key)
        if ref is None:
            raise wrong
        start = position + _LENGTH_BYTES
        if start + ref.nbytes > file.size:
            raise CheckpointError(f"{file.name} is truncated: storage {shown(key)} passes the end of the file.")
        if int.from_bytes(file.read(position, _LENGTH_BYTES), "little") != ref.numel:
            raise wrong
        places[key] = (start, ref.nbytes)
        position = start + ref.nbytes
    if storages.keys() - places.keys():
        raise wrong
    return places


# -- a file's format by its contents, because a file can have any extension --

Format = Literal["safetensors", "torch-zip", "torch-legacy", "json"]

_HEAD_BYTES = 1024
_TAR_MAGIC_AT = 257
_PICKLE_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NOT_READY: tuple[tuple[bytes, str], ...] = (
    (_LFS_POINTER, "is a git-LFS pointer, not the file itself; run `git lfs pull`"),
    (b"PK\x05\x06", "is an empty zip file"),
    (b"\x1f\x8b", "is compressed with gzip; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; decompress it first"),
)
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "is a GGUF inference file, which holds no training state and is not read"),
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file, which is not read"),
    (b"\x93NUMPY", "is a NumPy array, not a checkpoint"),
)
_BARE_PICKLE = "is a bare pickle, which could run code when loaded; ampdoctor does not read it"


def sniff(file: RegularFile) -> Format:
    """Returns a file's format by its contents; raises OtherFormatError for a known one that is not read."""
    if file.size == 0:
        raise CheckpointError(f"{file.name} is empty.")
    head = file.head(_HEAD_BYTES)
    if head.startswith(b"PK\x03\x04"):
        return "torch-zip"
    if PICKLED_MAGIC in (head[2:14], head[11:23]):  # from protocol 4 on behind the length of a frame
        return "torch-legacy"
    if looks_like_safetensors(head):
        return "safetensors"
    for table, kind in ((_NOT_READY, CheckpointError), (_OTHERS, OtherFormatError)):
        for magic, sentence in table:
            if head.startswith(magic):
                raise kind(f"{file.name} {sentence}.")
    if head.lstrip()[:1] == b"{":
        return "json"
    if head[:1] == b"\x80" and head[1:2] in _PICKLE_PROTOCOLS:
        raise OtherFormatError(f"{file.name} {_BARE_PICKLE}.")
    raise CheckpointError(f"{file.name} {_what_else(head)}.")


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has put a pointer in the place of a file; False if it cannot be read."""
    try:
        with RegularFile(path, path.name) as file:
            return file.head(len(_LFS_POINTER)) == _LFS_POINTER
    except CheckpointError:
        return False


def _what_else(head: bytes) -> str:
    """Returns what a file of no known format probably is."""
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return "is a tar file (torch 0.1 or an archive), which is not read; unpack it or torch.save it again"
    if not any(head):
        return "starts with zeros only: the write was probably cut off"
    if len(head) < 8:
        return f"is truncated: {len(head)} bytes are no checkpoint"
    return "is not a checkpoint in a format that is read (safetensors, torch.save)"
