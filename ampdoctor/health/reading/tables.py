"""Tables and JSON lines with the column names that trainers use: Lightning's `metrics.csv`, and any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.formats.log_files import (
    Left,
    csv_rows,
    is_log,
    json_rows,
    known_fields,
    lines_in,
    step_of,
)
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.run_log.lines import RunLine, Stamped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place, kind_of_one_file
from ampdoctor.health.reading.rows import Row, lines_of, row_of

_LIGHTNING = "metrics.csv"
_SOMETHING = frozenset({"loss", "grad_norm", "scale"})
_TRIED = 1000
"""Rows by which a file is told from one of another kind: a log says a loss, a norm or a scale within these."""
_TABLES = frozenset({".csv", ".tsv"})


def _is_table(name: str) -> bool:
    return Path(name).suffix in _TABLES


def _rows(file: RegularFile, left: Left) -> Iterator[Mapping[str, Any]]:
    lines = lines_in(file, left=left)
    if _is_table(file.name):
        header = next(lines, b"")
        yield from csv_rows(chain([header], lines), file.name, delimiter=_delimiter(file.name, header), left=left)
        return
    yield from json_rows(lines, left)
    torn = Left()
    yield from json_rows([left.unfinished], torn)  # an object is whole where it can be read
    if not torn.damaged:  # else it was no object
        left.unfinished = b""


def _delimiter(name: str, header: bytes) -> str:
    if Path(name).suffix == ".tsv":
        return "\t"
    return ";" if b";" in header and b"," not in header else ","


def _is_a_log(place: Place, name: str) -> bool:
    """Does a file name steps, and a loss, a norm or a scale?"""
    steps, found = False, False
    try:
        with RegularFile(place.folder / name, name) as file:
            for _, row in zip(range(_TRIED), _rows(file, Left()), strict=False):
                fields = known_fields(row)
                steps = steps or step_of(fields) is not None
                found = found or bool(fields.keys() & _SOMETHING)
                if steps and found:
                    return True
    except CheckpointError as error:
        place.refused[name] = str(error)
    return False


def _claims_lightning(place: Place) -> Sequence[str]:
    return [_LIGHTNING] if _LIGHTNING in place.names and _is_a_log(place, _LIGHTNING) else ()


def _logs_of(place: Place) -> list[str]:
    likely = [name for name in place.names if place.named or is_log(name) or _is_table(name)]
    return [name for name in likely if _is_a_log(place, name)]


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
    (name,) = names
    with RegularFile(folder / name, name) as file:
        found: Iterator[Row | None] = (row_of(known_fields(row)) for row in _rows(file, noticed.left[name]))
        run = RunLine(name=folder.name if name == _LIGHTNING else Path(name).stem)
        yield from lines_of((row for row in found if row is not None), run, noticed.order)


LIGHTNING = LogKind(format="lightning", claims=_claims_lightning, read=_read)
ANY_TABLE = kind_of_one_file("table", _logs_of, _read)
