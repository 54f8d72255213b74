"""The wire format of protobuf, as far as logs need it: a message's fields, without its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 are groups, which none of the messages read here has."""

_Field = tuple[int, int, Any]


def message_fields(data: bytes) -> Iterator[_Field]:
    """Yields (number, wire type, value) of a message's fields: an int for varints, bytes for all others.

    Raises:
        ValueError: The bytes are not a message.
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
    """Returns an unsigned number of at most 64 bits, seven in each byte, and where it ends.

    Raises:
        ValueError: It has more bytes than 64 bits need, or the data end within it.
    """
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise ValueError(at)
