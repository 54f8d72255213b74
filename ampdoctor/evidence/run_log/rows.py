"""Steps and details as rows of plain values, which a pipe carries in a fraction of the time that parsing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias, cast

from ampdoctor.evidence.run_log.details import DetailLine
from ampdoctor.evidence.run_log.lines import Stamp, Stamped, StepLine
from ampdoctor.evidence.run_log.quick import opened
from ampdoctor.evidence.run_log.tables import DetailTable, table_of
from ampdoctor.evidence.run_log.text import line_of, text_of

Row: TypeAlias = tuple[Sequence[Any], Sequence[Any], bool] | str
"""Values of the stamp, and of a step or a table of details, and whether it is a step. Another line is its text."""


def row_of(whole: Stamped) -> Row:
    """Returns a line's row."""
    line = whole.line
    if isinstance(line, StepLine):
        return _STAMP(whole.stamp), _STEP(line), True
    if isinstance(line, DetailLine | DetailTable):
        return _STAMP(whole.stamp), _TABLE(table_of(line)), False
    return text_of(whole)


def line_of_row(row: Row) -> Stamped:
    """Returns the line that `row_of` has been given; one of details as a table."""
    if isinstance(row, str):
        return cast("Stamped", line_of(row))
    stamp, values, is_step = row
    return _stamped(_make_stamp(*stamp), _make_step(*values) if is_step else DetailTable(*values))


def _values(record: type) -> Callable[[Any], Sequence[Any]]:
    return cast("Callable[[Any], Sequence[Any]]", attrgetter(*[one.name for one in fields(cast("Any", record))]))


_STAMP, _STEP, _TABLE = _values(Stamp), _values(StepLine), _values(DetailTable)
_stamped, _make_stamp, _make_step = opened(Stamped), opened(Stamp), opened(StepLine)
