"""TensorBoard's event files; the protobuf in them, and the LevelDB frames of W&B's files."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ampdoctor.checkpoints.files import ByteSource
from ampdoctor.evidence.report import Skipped

# -- the wire format of protobuf: a message's fields, without its schema --

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 are groups, which none of the messages read here has."""

_Field = tuple[int, int, Any]


def message_fields(data: bytes) -> Iterator[_Field]:
    """Yields (number, wire type, value) of a message's fields: an int for varints, bytes for all others.

    Raises ValueError if the bytes are not a message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        if wire == BYTES:
            length, at = _varint(data, at)
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        else:
            raise ValueError(wire)
        if length > len(data) - at:
            raise ValueError(length)
        yield number, wire, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an unsigned number of at most 64 bits, seven in each byte, and where it ends."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise ValueError(at)


PREFIX = "events.out.tfevents."
MAX_RECORD = 4096
"""Maximum number of bytes of a decoded record: a scalar with a tag and a description has a few hundred."""
_HEAD, _TAIL = 12, 4
_BLOCK = 1024 * 1024
_MASK = 0xA282EAD8
"""Added to a rotated CRC, so that data that hold their own CRC do not look intact by chance (TFRecord)."""

_DTYPES = {1: ("<f", 5), 2: ("<d", 6)}
"""Scalar DataTypes of a TensorProto: how values are packed, and their field if `tensor_content` is empty."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """One event: its time in seconds since 1970, its step and its scalars by tag."""

    wall_time: float
    step: int
    values: dict[str, float]


def is_event_file(name: str) -> bool:
    """Whether a file of this name is a TensorBoard event file."""
    return name.startswith(PREFIX)


def scalars_in(file: ByteSource, damaged: list[Skipped]) -> Iterator[Scalars]:
    """Yields a file's events in the order in which they lie there, up to the first damaged record."""
    for offset, length in _records(file, damaged):
        if length > MAX_RECORD:
            continue
        data = file.read(offset, length + _TAIL)
        if int.from_bytes(data[length:], "little") != masked_crc(data[:length]):
            damaged.append(_damaged(file, offset - _HEAD))
            return
        try:
            yield _event(data[:length])
        except ValueError:  # intact, but not an event: another program's record
            continue


def _damaged(file: ByteSource, at: int) -> Skipped:
    return Skipped(what=file.name, reason=f"not read past byte {at}: that record is damaged")


# -- the frames --


def _records(file: ByteSource, damaged: list[Skipped]) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) of each record's data, up to the first wrong checksum of a length."""
    at, start, block = 0, 0, b""
    while at + _HEAD <= file.size:
        if not start <= at <= at + _HEAD <= start + len(block):
            start, block = at, file.read(at, min(_BLOCK, file.size - at))
        head = block[at - start : at - start + _HEAD]
        if int.from_bytes(head[8:], "little") != masked_crc(head[:8]):
            damaged.append(_damaged(file, at))
            return
        length = int.from_bytes(head[:8], "little")
        if at + _HEAD + length + _TAIL > file.size:
            return
        yield at + _HEAD, length
        at += _HEAD + length + _TAIL


def masked_crc(data: bytes) -> int:
    """Returns the checksum of TFRecord: CRC-32C, rotated right by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, lowest bit first
    return byte


_TABLE = tuple(_remainder(byte) for byte in range(256))


# -- the messages --


def _event(data: bytes) -> Scalars:
    """Returns the scalars of an Event: wall_time 1, step 2, summary 5."""
    wall_time, step = 0.0, 0
    values: dict[str, float] = {}
    for number, wire, value in message_fields(data):
        if (number, wire) == (1, FIXED64):
            (wall_time,) = struct.unpack("<d", value)
        elif (number, wire) == (2, VARINT):
            step = _signed(value)
        elif (number, wire) == (5, BYTES):
            values |= dict(_summary(value))
    return Scalars(wall_time if math.isfinite(wall_time) else 0.0, step, values)


def _summary(data: bytes) -> Iterator[tuple[str, float]]:
    """Yields (tag, number) of a Summary's scalars: value 1, with tag 1, simple_value 2 and tensor 8."""
    for number, wire, value in message_fields(data):
        if (number, wire) != (1, BYTES):
            continue
        tag, scalar = "", None
        for inner, kind, content in message_fields(value):
            if (inner, kind) == (1, BYTES):
                tag = content.decode("utf-8", "replace")
            elif (inner, kind) == (2, FIXED32):
                (scalar,) = struct.unpack("<f", content)
            elif (inner, kind) == (8, BYTES):
                scalar = _tensor(content)
        if scalar is not None:
            yield tag, scalar


def _tensor(data: bytes) -> float | None:
    """Returns a TensorProto's number (dtype 1, tensor_content 4, float_val 5, double_val 6); None unless it has one."""
    fields = list(message_fields(data))
    packing, own = _DTYPES.get(next((value for number, _, value in fields if number == 1), 0), (None, 0))
    if packing is None:
        return None
    packed = b"".join(value for number, wire, value in fields if number in (4, own) and wire != VARINT)
    return float(struct.unpack(packing, packed)[0]) if len(packed) == struct.calcsize(packing) else None


def _signed(value: int) -> int:
    """Returns a signed number from its two's complement of 64 bits."""
    return value - (1 << 64) if value >> 63 else value


# -- the frame of LevelDB's logs, in which W&B keeps a run: records in blocks, in pieces with checksums --

_FRAME_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")
"""Before a piece's data: a CRC-32 of its type and data, its length, its type."""
_FRAME_HEAD = _PIECE.size
_WHOLE, _FIRST, _LAST = 1, 2, 4
_MOST_PIECES = 512  # of a joined record, of a block at most each: a step with 10,000 numbers has a hundredth of them


def framed_records(file: ByteSource, header: int, damaged: list[Skipped]) -> Iterator[bytes]:
    """Yields the whole records; after a damaged piece, reading continues with the next block.

    `header` bytes precede the first piece. `damaged` receives the number of damaged blocks; a last piece that is cut
    off is being written.
    """
    pieces: list[bytes] = []
    bad = 0
    for start in range(0, file.size, _FRAME_BLOCK):
        block = file.read(start, min(_FRAME_BLOCK, file.size - start))
        at = 0 if start else header
        while at + _FRAME_HEAD <= len(block):
            check, length, kind = _PIECE.unpack_from(block, at)
            data = block[at + _FRAME_HEAD : at + _FRAME_HEAD + length]
            if not kind and not length:  # the rest of a block that was left empty
                break
            if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != check:
                bad += len(data) == length or start + _FRAME_BLOCK < file.size
                pieces = []
                break
            if kind in (_WHOLE, _FIRST) or not pieces or len(pieces) >= _MOST_PIECES:
                pieces = [data] if kind in (_WHOLE, _FIRST) else []  # else its beginning was damaged, or it is too long
            else:
                pieces.append(data)
            if kind in (_WHOLE, _LAST) and pieces:
                yield b"".join(pieces)
                pieces = []
            at += _FRAME_HEAD + length
    if bad:
        blocks = "a block of it is" if bad == 1 else f"{bad} of its blocks are"
        damaged.append(Skipped(what=file.name, reason=f"{blocks} damaged, and read up to there"))
