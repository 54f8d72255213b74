"""Steps and details as rows of plain values, which a pipe carries in a fraction of the time that parsing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias, cast

from ampdoctor.evidence.run_log.details import DetailLine, TensorDetail
from ampdoctor.evidence.run_log.lines import Stamp, Stamped, StepLine
from ampdoctor.evidence.run_log.quick import opened
from ampdoctor.evidence.run_log.text import line_of, text_of

Row: TypeAlias = tuple[Sequence[Any], Sequence[Any], tuple[Sequence[Any], ...] | None] | str
"""Values of the stamp, of the line, and of each of its tensors; None for those of a step. Another line is its text."""


def row_of(whole: Stamped) -> Row:
    """Returns a line's row."""
    line = whole.line
    if isinstance(line, StepLine):
        return _STAMP(whole.stamp), _STEP(line), None
    if isinstance(line, DetailLine):
        return _STAMP(whole.stamp), _DETAIL(line), tuple(map(_TENSOR, line.tensors))
    return text_of(whole)


def line_of_row(row: Row) -> Stamped:
    """Returns the line that `row_of` has been given."""
    if isinstance(row, str):
        return cast("Stamped", line_of(row))
    stamp, values, tensors = row
    if tensors is None:
        return Stamped(_make_stamp(*stamp), _make_step(*values))
    return Stamped(_make_stamp(*stamp), _make_detail(*values, tuple([_make_tensor(*one) for one in tensors])))


def _values(record: type, without: str = "") -> Callable[[Any], Sequence[Any]]:
    names = [one.name for one in fields(cast("Any", record)) if one.name != without]
    return cast("Callable[[Any], Sequence[Any]]", attrgetter(*names))


_STAMP, _STEP, _TENSOR = _values(Stamp), _values(StepLine), _values(TensorDetail)
_DETAIL = _values(DetailLine, without="tensors")
_make_stamp, _make_step, _make_tensor = opened(Stamp), opened(StepLine), opened(TensorDetail)
_AT = [one.name for one in fields(cast("Any", DetailLine))].index("tensors")
_with_tensors = opened(DetailLine)


def _make_detail(*values: Any) -> DetailLine:
    *others, tensors = values
    return _with_tensors(*others[:_AT], tensors, *others[_AT:])
