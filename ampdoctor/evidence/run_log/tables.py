"""A line of details by columns: what judging and condensing ask of it, in a form that a pipe carries at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from operator import attrgetter
from typing import Any

from ampdoctor.evidence.run_log.details import DetailLine

MEASURES = (
    "norm",
    "amax",
    "nonfinite",
    "flushed_share",
    "zero_share",
    "headroom_binades",
    "update_ratio",
    "unmoved_share",
    "elements",
    "scale",
)


@dataclass(frozen=True, slots=True)
class DetailTable:
    """Tensors of a step.

    Attributes:
        step: As of the line, and so are the next three.
        reason: Likewise.
        optimizer: Likewise.
        loss_scale: Likewise.
        tensors: Index of each tensor's name.
        roles: Each one's role.
        parts: Each one's part.
        calls: Each one's call.
        formats: Each one's format.
        measures: Of each of `MEASURES` each one's, as float64; NaN where it was not measured.
    """

    step: int
    reason: str
    optimizer: int
    loss_scale: float | None
    tensors: tuple[int, ...]
    roles: tuple[str, ...]
    parts: tuple[str, ...]
    calls: tuple[int, ...]
    formats: tuple[str | None, ...]
    measures: bytes


_ADDRESS = ("tensor", "role", "part", "call", "format")
_COLUMNS = attrgetter(*_ADDRESS, *MEASURES)


def table_of(line: DetailLine | DetailTable) -> DetailTable:
    """Returns a line by columns, if it is not so already."""
    if isinstance(line, DetailTable):
        return line
    columns: list[Any] = list(zip(*map(_COLUMNS, line.tensors), strict=True)) or [()] * len((*_ADDRESS, *MEASURES))
    tensors, roles, parts, calls, formats, *measures = columns
    return DetailTable(
        step=line.step,
        reason=line.reason,
        optimizer=line.optimizer,
        loss_scale=line.loss_scale,
        tensors=tensors,
        roles=roles,
        parts=parts,
        calls=calls,
        formats=formats,
        measures=b"".join(map(_numbers, measures)),
    )


def _numbers(column: Sequence[float | None]) -> bytes:
    return array("d", [nan if value is None else value for value in column]).tobytes()
