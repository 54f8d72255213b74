"""The structure of a `torch.save` zip, and where the bytes of each storage are."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ampdoctor.checkpoints.formats.zip_directory import Member, read_directory
from ampdoctor.checkpoints.pickles.pickle_bytes import MAX_PICKLE_BYTES
from ampdoctor.checkpoints.storage.files import ByteSource
from ampdoctor.errors import CheckpointError, LimitExceededError

_SMALL = 64
"""Bytes that are read from a record with a word or a number."""


@dataclass(frozen=True, slots=True)
class Records:
    """The contents of a `torch.save` zip.

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
    members = {member.name: member for member in read_directory(file)}
    prefix = _prefix(list(members), file.name)
    if _small(file, members.get(f"{prefix}/byteorder")) not in {b"", b"little"}:
        raise CheckpointError(f"{file.name} was written on a big-endian machine, which is not read.")
    structure = members[f"{prefix}/data.pkl"]
    if structure.size > MAX_PICKLE_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of data.pkl", MAX_PICKLE_BYTES, structure.size)
    pickle = file.read(structure.start, structure.size)
    if structure.crc not in {0, zlib.crc32(pickle)}:  # 0: torch was told not to compute checksums
        raise CheckpointError(f"{file.name} is corrupted: the checksum of its structure is wrong.")
    version = _small(file, members.get(f"{prefix}/version")) or _small(file, members.get(f"{prefix}/.data/version"))
    folder = f"{prefix}/data/"
    storages = {n.removeprefix(folder): (m.start, m.size) for n, m in members.items() if n.startswith(folder)}
    return Records(pickle, version, storages)


def _small(file: ByteSource, member: Member | None) -> bytes:
    """Returns a record of a few bytes; empty if there is none."""
    return b"" if member is None else file.read(member.start, min(member.size, _SMALL))


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
