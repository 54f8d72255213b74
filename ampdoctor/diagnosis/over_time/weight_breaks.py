"""Weights whose norm has begun to grow or to shrink as it has not before: what two rules share."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.tensor_courses import NEW, TensorMoment, breaks

FLOOR = 0.003
"""Deviation of a rate that is assumed at least, in e-folds a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBreak:
    """A weight that departs.

    Attributes:
        row: Its row.
        by: Robust deviations, positive.
        looks: The last looks over which it is seen best.
        before: Norm before them.
        now: Norm at the last.
    """

    row: int
    by: float
    looks: int
    before: float
    now: float


def moved_first(moment: TensorMoment, found: WeightBreak) -> str:
    """Returns what left the usual first over the looks of a break and shortly before: the settings only if they did."""
    steps = moment.of_steps
    if steps is None:
        return "weights"
    since = int(moment.steps[-1 - found.looks])
    return steps.first("optimizer" if steps.rising else "weights", since=since)


def weight_breaks(moment: TensorMoment, *, sign: int, least: float, share: float, change: float) -> list[WeightBreak]:
    """Returns the weights that depart, the one that does so most first.

    Args:
        moment: The looks.
        sign: 1 for those that grow, -1 for those that shrink.
        least: Robust deviations.
        share: Of the norm of all weights that one must have or have had: a bias that starts at zero grows by any
            factor, and matters to none.
        change: Of the norm within the last looks, as an e-fold.
    """
    rows = moment.rows("parameter")
    norms = moment.values("norm", rows)
    if not len(rows) or norms.shape[1] < 2:
        return []
    size = np.nan_to_num(norms[:, -1])
    found: dict[int, WeightBreak] = {}
    for new in range(1, NEW + 1):
        if norms.shape[1] < 1 + new:
            break
        broken = breaks(norms, FLOOR, new, least=least)
        was = np.nan_to_num(norms[:, -1 - new])
        large = np.maximum(size, was) >= share * np.sqrt((size**2).sum())
        hit = large & (sign * broken.by >= least) & (sign * broken.rate * new >= change)
        for row in map(int, np.flatnonzero(hit)):
            by = float(sign * broken.by[row])
            if row not in found or by > found[row].by:
                found[row] = WeightBreak(
                    row=int(rows[row]), by=by, looks=new, before=float(was[row]), now=float(size[row])
                )
    return sorted(found.values(), key=lambda one: -one.by)
