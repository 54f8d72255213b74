"""The frame of LevelDB's logs, in which W&B keeps a run: records in blocks, in pieces that know their checksum."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampdoctor.checkpoints.storage.files import ByteSource
from ampdoctor.evidence.report import Skipped

_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")
"""Before a piece's data: a CRC-32 of its type and data, its length, its type."""
_HEAD = _PIECE.size
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
MAX_RECORD = 16 * 1024 * 1024
"""Bytes of a record that is put together: a step with 10,000 numbers has a hundredth of it."""


def framed_records(file: ByteSource, header: int, damaged: list[Skipped]) -> Iterator[bytes]:
    """Yields the whole records; of a block with a damaged piece those before it, and the next block begins anew.

    Args:
        file: The log.
        header: Bytes of its first block before the first piece.
        damaged: Gets how many blocks were not read to their end. A last piece that is cut off is being written.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    parts, bad = _Parts(), 0
    for start in range(0, file.size, _BLOCK):
        block = file.read(start, min(_BLOCK, file.size - start))
        at = 0 if start else header
        while at + _HEAD <= len(block):
            check, length, kind = (
                int.from_bytes(block[at + a : at + b], "little") for a, b in ((0, 4), (4, 6), (6, 7))
            )
            data = block[at + _HEAD : at + _HEAD + length]
            if not kind and not length:  # the rest of a block that was left empty
                break
            if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != check:
                bad += len(data) == length or start + _BLOCK < file.size
                parts = _Parts()
                break
            record = parts.add(kind, data)
            if record is not None:
                yield record
            at += _HEAD + length
    if bad:
        blocks = "a block of it is" if bad == 1 else f"{bad} of its blocks are"
        damaged.append(Skipped(what=file.name, reason=f"{blocks} damaged, and read up to there"))


@dataclass(slots=True)
class _Parts:
    """The pieces of a record that lies in several blocks."""

    pieces: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, kind: int, data: bytes) -> bytes | None:
        """Returns the record that is whole with this piece; one that is longer than `MAX_RECORD` never is."""
        if kind == _WHOLE:
            self.pieces, self.size = [], 0
            return data
        if kind == _FIRST:
            self.pieces, self.size = [data], len(data)
            return None
        if not self.pieces:  # its beginning was damaged, or too long
            return None
        self.pieces.append(data)
        self.size += len(data)
        if self.size > MAX_RECORD:
            self.pieces = []
        elif kind == _LAST:
            whole, self.pieces = b"".join(self.pieces), []
            return whole
        return None
