"""The directory of a zip file, read so that no two readers of the file can see different members.

The standard library's reader is not used. It reads a whole directory however long that claims to be, makes an object of
a kilobyte for each member before anybody can count them, accepts a zip with foreign bytes at its beginning or end, and
never compares the two headers of a member. Structures: PKWARE's APPNOTE, 4.3.7 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ampdoctor.checkpoints.storage.files import ByteSource, shown
from ampdoctor.errors import CheckpointError, LimitExceededError

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
class Member:
    """A file inside a zip.

    Attributes:
        name: Its name.
        start: Byte position of its content.
        size: Length of its content.
        crc: Checksum of its content, 0 if none was computed.
    """

    name: str
    start: int
    size: int
    crc: int


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


def read_directory(file: ByteSource) -> list[Member]:
    """Returns the members in the order of the directory; none of their content is read.

    Raises:
        CheckpointError: The zip is truncated, corrupted or compressed, or readers could disagree on what it holds.
        LimitExceededError: It has more members, or a longer directory, than a checkpoint needs.
    """
    offset, size, count = _end(file)
    if count > MAX_MEMBERS:
        raise LimitExceededError(f"{file.name}: zip members", MAX_MEMBERS, count)
    if size > MAX_DIRECTORY_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of the zip's directory", MAX_DIRECTORY_BYTES, size)
    entries = list(_entries(file, file.read(offset, size), count))
    _refuse_doubles(file, entries)
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
    return [Member(e.name, starts[e.header], e.size, e.crc) for e in entries]


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
            except RuntimeError:  # from the generator: fewer numbers than full fields
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


def _refuse_doubles(file: ByteSource, entries: list[_Entry]) -> None:
    """Refuse two records of one name, even if they differ in case: torch ignores case when it looks them up."""
    if len({entry.name.lower() for entry in entries}) < len(entries):
        raise CheckpointError(
            f"{file.name} holds two records of the same name; refused, because readers disagree on which one counts."
        )


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
