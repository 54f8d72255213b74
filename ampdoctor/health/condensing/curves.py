"""Curves of a run over at most 2,000 spans of its steps, with the extremes of each span kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.report_health import Curve, CurveName, HealthAxis
from ampdoctor.health.condensing.columns import Column

MOST_SPANS = 2000


@dataclass(frozen=True, slots=True)
class Spans:
    """Equal shares of the rows of columns that are in the order of their steps.

    Attributes:
        starts: The first row of each span.
        rows: How many rows there are.
    """

    starts: NDArray[np.intp]
    rows: int

    @property
    def ends(self) -> NDArray[np.intp]:
        """Behind the last row of each span."""
        return np.append(self.starts[1:], self.rows)

    def grid(self, values: Column) -> Column:
        """Returns a row of values for each span, filled up with NaN."""
        lengths = self.ends - self.starts
        grid = np.full((len(self.starts), int(lengths.max(initial=0))), np.nan)
        grid[np.arange(grid.shape[1]) < lengths[:, None]] = values
        return grid


def spans_of(steps: Column) -> Spans:
    """Returns the spans of steps in their order; the lines of one step are in one span where there is room for all."""
    firsts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1])) if len(steps) else np.empty(0, np.intp)
    if len(firsts) > MOST_SPANS:
        firsts = firsts[np.linspace(0, len(firsts), MOST_SPANS, endpoint=False).astype(np.intp)]
    return Spans(firsts, len(steps))


def axis_of(columns: Mapping[str, Column], spans: Spans) -> HealthAxis:
    """Returns the spans by their steps, with what was counted up to the end of each."""
    steps, last = columns["step"], spans.ends - 1
    skipped = np.add.reduceat(columns["skipped"] == 1, spans.starts) if len(spans.starts) else np.empty(0)
    return HealthAxis(
        first=_integers(steps[spans.starts]),
        last=_integers(steps[last]),
        samples=_counted(columns["samples"], spans),
        tokens=_counted(columns["tokens"], spans),
        time_ms=_counted(columns["time_ms"], spans),
        skipped=_integers(skipped),
    )


def curve_of(name: CurveName, values: Column, spans: Spans) -> Curve | None:
    """Returns a number's curve; None where it is nowhere known.

    Args:
        name: What it is.
        values: A value for each row; NaN where it is not known, infinite where it was not finite.
        spans: Of the rows.
    """
    if np.isnan(values).all():
        return None
    grid = spans.grid(values)
    nonfinite = np.isinf(grid).sum(axis=1)
    grid[np.isinf(grid)] = np.nan
    grid.sort(axis=1)  # NaN goes to the end
    known = np.isfinite(grid).sum(axis=1)
    row, some, last = np.arange(len(grid)), known > 0, np.maximum(known - 1, 0)
    middle = grid[row, last // 2] / 2 + grid[row, (last + 1) // 2] / 2  # their sum may be too large
    return Curve(
        name=name,
        low=_floats(grid[:, 0], some),
        middle=_floats(middle, some),
        high=_floats(grid[row, last], some),
        p99=_floats(grid[row, np.maximum(np.ceil(0.99 * known).astype(np.intp) - 1, 0)], some)
        if name == "step_seconds"
        else None,
        nonfinite=_integers(nonfinite) if nonfinite.any() else None,
    )


def _counted(values: Column, spans: Spans) -> tuple[int | None, ...] | None:
    """Returns the last known value of each span; None where none is known in any."""
    if np.isnan(values).all():
        return None
    last = np.where(np.isnan(values), -1.0, values)
    found = np.maximum.reduceat(last, spans.starts)
    return tuple(None if value < 0 else int(value) for value in found.tolist())


def _integers(values: NDArray[Any]) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).tolist())


def _floats(values: Column, some: NDArray[np.bool_]) -> tuple[float | None, ...]:
    return tuple(value if there else None for value, there in zip(values.tolist(), some.tolist(), strict=True))
