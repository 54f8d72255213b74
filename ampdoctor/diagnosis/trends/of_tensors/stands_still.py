"""AMP727: a parameter that moved moves no more, though a gradient reaches it."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import NEW, TensorMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

OTHERS = Threshold(
    code="AMP727",
    name="others",
    default=0.1,
    unit="share",
    why="Of the parameters that still move: at the end of a schedule nothing moves, and nothing is wrong.",
)
_LEAST = 1e-6
"""Of its norm, by which a step must have moved a parameter: what moved by less, as a bias before a BatchNorm or a model
that has learned all, stood still before, and moves by roundings."""
RULE = register(
    "AMP727",
    "stands-still",
    "A parameter moves no more, though it has a gradient",
    worst="warning",
    commands=WATCHED,
    thresholds=(OTHERS,),
)


@RULE.judges(TensorMoment)
def _stands_still(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    if moment.seen < 2 * NEW:
        return
    rows = moment.rows("parameter")
    ratios = moment.values("update_ratio", rows)
    known = ~np.isnan(ratios[:, -2 * NEW :]).any(axis=1)
    rows, ratios = rows[known], ratios[known]
    if not len(rows):
        return
    moved = (ratios[:, :-NEW] > _LEAST).sum(axis=1) >= NEW
    still = (ratios[:, -NEW:] == 0).all(axis=1)
    if not still.any() or (ratios[:, -NEW:] > 0).all(axis=1).mean() < thresholds[OTHERS]:
        return
    hit = np.flatnonzero(moved & still & _reached(moment, rows))
    if not len(hit):
        return
    worst = hit[0]
    usual = float(np.median(ratios[worst, :-NEW]))
    yield over_time_finding(
        RULE,
        "warning",
        f"{TENSOR} has a gradient and has not moved in the last {NEW} looks; before, a step moved it by {usual:.2g} "
        f"of its norm{f'; so it is with {len(hit) - 1} more' if len(hit) > 1 else ''}.",
        step=moment.line.step,
        first="optimizer",
        tensor=moment.tensors[rows[worst]],
        also=[moment.tensors[rows[i]] for i in hit[1:]],
        evidence={"update_ratio_before": usual, "tensors": len(hit)},
    )


def _reached(moment: TensorMoment, rows: np.ndarray) -> np.ndarray:
    """(rows) whether the parameter's gradient was not zero in any of the last looks, and not far below what it was."""
    of_gradient = {moment.tensors[row]: row for row in moment.rows("gradient")}
    norms = moment.values("norm")
    found = np.zeros(len(rows), bool)
    for i, row in enumerate(rows):
        at = of_gradient.get(moment.tensors[row])
        if at is not None:
            last, before = norms[at, -NEW:], norms[at, :-NEW]
            found[i] = bool((last > 0).all() and np.nanmedian(last) > 0.01 * np.nanmedian(before))
    return found
