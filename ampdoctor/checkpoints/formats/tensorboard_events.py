"""Reads TensorBoard's event files as a training log: the scalars of `events.out.tfevents.*`, without TensorBoard.

A file is a row of records (TFRecord): 8 bytes of length, their masked CRC-32C, the data, and the data's CRC. The data
are a protobuf message (`Event` of tensorflow/core/util/event.proto). The reader follows the fields that lead to a
scalar and passes over the rest. It descends to a fixed depth and builds only numbers and tags.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ampdoctor.checkpoints.formats.log_files import in_order, log_entry, thinned
from ampdoctor.checkpoints.formats.protobuf import BYTES, FIXED32, FIXED64, VARINT, message_fields
from ampdoctor.checkpoints.storage.files import ByteSource
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.report import Skipped

PREFIX = "events.out.tfevents."
MAX_EVENT_BYTES = 1 << 30
"""For all files of a run; histograms and images take hundreds of megabytes, which are passed over unread."""
MAX_RECORDS = 2_000_000
"""Maximum number of records of a run's files whose lengths are read."""
MAX_RECORD = 4096
"""Maximum number of bytes of a record that is decoded: a scalar with a tag and a description has a few hundred."""
MAX_READ = 16 * 1024 * 1024
"""Maximum number of bytes of decoded records (200,000 scalars); longer logs are thinned evenly."""

_HEAD, _TAIL = 12, 4
_BLOCK = 1024 * 1024
_MASK = 0xA282EAD8
"""Added to a rotated CRC, so that data that hold their own CRC do not look intact by chance (TFRecord)."""

_DTYPES = {1: ("<f", 5), 2: ("<d", 6)}
"""DataTypes of a TensorProto that a scalar has: how values are packed, and their field if `tensor_content` is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """The event files of one run as a log.

    Attributes:
        entries: As those of `log_files.read_log`.
        damaged: Files that are not read to their end, and why. A truncated last record is not damage: it is being
            written.
    """

    entries: tuple[LogEntry, ...] = ()
    damaged: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class Scalars:
    """One event: its time in seconds since 1970, its step and its scalars by tag."""

    wall_time: float
    step: int
    values: dict[str, float]


def is_event_file(name: str) -> bool:
    """Is a file's name that of a TensorBoard event file?"""
    return name.startswith(PREFIX)


def read_events(files: Sequence[ByteSource]) -> EventLog:
    """Returns the scalars of a run's event files, one file per start of the run, in the order of their times.

    A scalar that comes after one of a later step belongs to a restart, which undoes that step (`log_files.in_order`).

    Args:
        files: The event files in one folder.

    Raises:
        CheckpointError: The bytes cannot be read.
        LimitExceededError: They are larger than `MAX_EVENT_BYTES`, or have more than `MAX_RECORDS` records.
    """
    size = sum(file.size for file in files)
    if files and size > MAX_EVENT_BYTES:
        raise LimitExceededError(f"{files[0].name}: bytes of event files", MAX_EVENT_BYTES, size)
    damaged: list[Skipped] = []
    records: list[tuple[ByteSource, int, int]] = []
    for file in files:
        for offset, length in _records(file, damaged):
            if length <= MAX_RECORD:
                records.append((file, offset, length))
            if len(records) > MAX_RECORDS:
                raise LimitExceededError(f"{file.name}: records of event files", MAX_RECORDS, len(records))
    records = thinned(records)
    inside = sum(length for _, _, length in records)
    if inside > MAX_READ:
        records = thinned(records, max(len(records) * MAX_READ // inside, 1))
    return EventLog(entries=in_order(_entries(_read(records, damaged))), damaged=tuple(damaged))


def scalars_in(files: Iterable[ByteSource], damaged: list[Skipped]) -> Iterator[Scalars]:
    """Yields the events of files, one file after the other as they lie there, however many there are.

    Args:
        files: The event files in one folder, the oldest first.
        damaged: Gets the files that are not read to their end, and why.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    found = ((file, *record) for file in files for record in _records(file, damaged))
    return _read((one for one in found if one[2] <= MAX_RECORD), damaged)


def _entries(events: Iterable[Scalars]) -> Iterator[LogEntry]:
    """Yields events in the order of their times; consecutive events of one step form one line of a log."""
    for step, together in groupby(sorted(events, key=lambda event: event.wall_time), key=lambda event: event.step):
        row: dict[str, Any] = {}
        for event in together:
            row |= event.values
        entry = log_entry({**row, "step": step})
        if entry is not None:
            yield entry


# -- the frames ------------------------------------------------------------------------------------------------------


def _records(file: ByteSource, damaged: list[Skipped]) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) of each record's data, as long as the checksums of the lengths hold."""
    at, start, block = 0, 0, b""
    while at + _HEAD <= file.size:
        if not start <= at <= at + _HEAD <= start + len(block):
            start, block = at, file.read(at, min(_BLOCK, file.size - at))
        head = block[at - start : at - start + _HEAD]
        if int.from_bytes(head[8:], "little") != masked_crc(head[:8]):
            damaged.append(Skipped(what=file.name, reason=f"not read past byte {at}: that record is damaged"))
            return
        length = int.from_bytes(head[:8], "little")
        if at + _HEAD + length + _TAIL > file.size:
            return
        yield at + _HEAD, length
        at += _HEAD + length + _TAIL


def _read(records: Iterable[tuple[ByteSource, int, int]], damaged: list[Skipped]) -> Iterator[Scalars]:
    """Yields the events of these records; of a file with a damaged record, those before it."""
    for file, group in groupby(records, key=lambda record: record[0]):
        for _, offset, length in group:
            data = file.read(offset, length + _TAIL)
            if int.from_bytes(data[length:], "little") != masked_crc(data[:length]):
                reason = f"not read past byte {offset - _HEAD}: that record is damaged"
                damaged.append(Skipped(what=file.name, reason=reason))
                break
            try:
                yield _event(data[:length])
            except ValueError:  # intact, but not an event: another program's record
                continue


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


# -- the messages ----------------------------------------------------------------------------------------------------


def _event(data: bytes) -> Scalars:
    """Returns the scalars of an Event: wall_time 1, step 2, summary 5.

    Raises:
        ValueError: The bytes are not a message.
    """
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
