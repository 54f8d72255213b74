"""The directory of a `torch.save` zip: where each record lies, after the checks that keep two readers from disagreeing.

Zip readers differ on duplicate names, on which header counts and on overlaps, and torch maps compressed records as if
they were plain (measured); a file that leaves room for such a difference is refused.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass

from ampdoctor.checkpoints.files import ByteSource
from ampdoctor.errors import CheckpointError, LimitExceededError

MAX_MEMBERS = 1_000_000
"""Zip members; one per storage."""
MAX_PICKLE_BYTES = 64 * 1024 * 1024
"""Of `data.pkl`; a model with 100,000 tensors needs about 20 MB."""

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True, slots=True)
class Records:
    """What a `torch.save` zip holds.

    Attributes:
        pickle: Content of `data.pkl`.
        version: Content of `version`.
        storages: Key of a storage -> byte position and length of its record.
    """

    pickle: bytes
    version: bytes
    storages: dict[str, tuple[int, int]]


def read_records(file: ByteSource) -> Records:
    """Read the directory, `data.pkl` and `version`; no tensor data are read.

    Raises:
        CheckpointError: The zip is corrupted, compressed, ambiguous, or not written by `torch.save`.
        LimitExceededError: A part is larger than a checkpoint needs.
    """
    members = _members(file)
    prefix = _prefix([m.filename for m in members], file.name)
    places: dict[str, tuple[int, int]] = {}
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
        places[member.filename] = (start, member.file_size)
    crcs = {m.filename: m.CRC for m in members}
    if _small(file, places, f"{prefix}/byteorder") not in {b"", b"little"}:
        raise CheckpointError(f"{file.name} was written on a big-endian machine, which is not read.")
    start, size = places[f"{prefix}/data.pkl"]
    if size > MAX_PICKLE_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of data.pkl", MAX_PICKLE_BYTES, size)
    pickle = file.read(start, size)
    if crcs[f"{prefix}/data.pkl"] not in {0, zlib.crc32(pickle)}:  # 0: torch was told not to compute checksums
        raise CheckpointError(f"{file.name} is corrupted: the checksum of its structure is wrong.")
    version = _small(file, places, f"{prefix}/version") or _small(file, places, f"{prefix}/.data/version")
    folder = f"{prefix}/data/"
    storages = {name.removeprefix(folder): at for name, at in places.items() if name.startswith(folder)}
    return Records(pickle, version, storages)


def _members(file: ByteSource) -> list[zipfile.ZipInfo]:
    try:
        with file.stream() as stream, zipfile.ZipFile(stream) as archive:
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
    return members


def _small(file: ByteSource, places: dict[str, tuple[int, int]], name: str) -> bytes:
    """A record of a few bytes; empty where there is none."""
    start, size = places.get(name, (0, 0))
    return file.read(start, min(size, 64))


def _prefix(names: list[str], file: str) -> str:
    """The folder inside the zip that holds everything."""
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
    return pickles[0].removesuffix("/data.pkl")


def _data_start(file: ByteSource, member: zipfile.ZipInfo) -> int:
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
