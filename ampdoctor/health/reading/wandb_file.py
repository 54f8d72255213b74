"""The file of a W&B run (`run-ID.wandb`), online or offline: its history, without the library and without its server.

The file is a log in LevelDB's frame. A record is a protobuf message of wandb_internal.proto, whose fields that lead to
a logged number are followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.event_files import BYTES, VARINT, framed_records, message_fields
from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.log_files import as_number, known_fields
from ampdoctor.evidence.log_records import EndLine, RunLine, Stamp, Stamped
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place
from ampdoctor.health.reading.rows import Row, lines_of, milliseconds, row_of

_MAGIC = b":W&B"
_HEADER = 7
"""Bytes before the first record."""
_HISTORY, _RUN, _EXIT = 2, 17, 18
"""Fields of a Record."""


def _claims(place: Place) -> Sequence[Sequence[str]]:
    return [[name] for name in place.latest(place.names) if name.endswith(".wandb") and place.head(name, 4) == _MAGIC]


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
    (name,) = names
    with RegularFile(folder / name, name) as file:
        run = _Run(name.removesuffix(".wandb").removeprefix("run-"))
        damaged: list[Skipped] = []
        yield from lines_of(run.rows(framed_records(file, _HEADER, damaged)), RunLine(name=run.name), noticed.order)
        noticed.skipped += damaged
    if run.exit_code is not None:
        yield Stamped(Stamp(run_id=run.name, time_ms=run.time_ms), EndLine(exit_code=run.exit_code))


class _Run:
    """What of a run stands in its records beside the rows of its history."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_code: int | None = None
        self.time_ms = 0

    def rows(self, records: Iterator[bytes]) -> Iterator[Row]:
        for record in records:
            try:
                for number, wire, value in message_fields(record):
                    if (number, wire) == (_HISTORY, BYTES):
                        row = self._row(value)
                        if row is not None:
                            yield row
                    elif (number, wire) == (_EXIT, BYTES):
                        codes = [code for field, kind, code in message_fields(value) if (field, kind) == (1, VARINT)]
                        self.exit_code = codes[0] & 0xFF if codes else 0
            except ValueError:  # whole, by its checksum, and of another make
                continue

    def _row(self, history: bytes) -> Row | None:
        values: dict[str, Any] = {}
        counted = 0
        for number, wire, value in message_fields(history):
            if (number, wire) == (1, BYTES):
                values |= _item(value)
            elif (number, wire) == (2, BYTES):
                counted = next((num for field, kind, num in message_fields(value) if (field, kind) == (1, VARINT)), 0)
        own = known_fields({key: value for key, value in values.items() if not key.startswith("_")})
        self.time_ms = milliseconds(values.get("_timestamp")) or self.time_ms
        told = values.get("_step")
        step = as_number(told if isinstance(told, int) else counted)
        return None if step is None else row_of({"step": step, **own}, self.time_ms)


def _item(data: bytes) -> dict[str, Any]:
    """Returns a HistoryItem's value by its key (1), or by its nested key (2) in one name; the value is JSON (16)."""
    keys, text = [], b""
    for number, wire, value in message_fields(data):
        if wire == BYTES and number in (1, 2):
            keys.append(value.decode("utf-8", "replace"))
        elif (number, wire) == (16, BYTES):
            text = value
    try:
        return {"/".join(key for key in keys if key): json.loads(text)}
    except (ValueError, RecursionError):
        return {}


WANDB = LogKind(format="wandb", claims=_claims, read=_read)
