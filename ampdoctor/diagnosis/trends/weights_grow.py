"""AMP733: weights begin to grow as they have not grown before."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import NEW, TensorMoment, breaks
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.threshold import Threshold

DEVIATIONS = Threshold(
    code="AMP733",
    name="deviations",
    default=22.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1e6,
    why="By which the growth of a weight's norm over the last three looks is above that of up to twelve before: the "
    "healthy trainings of benchmarks/alerts stay below 17, those whose weights run away reach 24 to 450.",
)
SHARE = Threshold(
    code="AMP733",
    name="share",
    default=0.1,
    unit="share",
    why="Of the norm of all weights that a tensor must have: a bias that starts at zero grows by any factor, and "
    "matters to none.",
)
RULE = register(
    "AMP733",
    "weights-grow",
    "Weights begin to grow",
    worst="warning",
    commands=WATCHED,
    thresholds=(DEVIATIONS, SHARE),
)
FLOOR = 0.003
"""Deviation of a rate that is assumed at least, in e-folds a look."""


@RULE.judges(TensorMoment)
def _weights_grow(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    rows = moment.rows("parameter")
    if not len(rows):
        return
    norms = moment.values("norm", rows)
    now = np.nan_to_num(norms[:, -1])
    found = breaks(norms, FLOOR)
    large = now >= thresholds[SHARE] * np.sqrt((now**2).sum())
    hit = np.flatnonzero(large & (found.by >= thresholds[DEVIATIONS]))
    if not len(hit):
        return
    hit = hit[np.argsort(-found.by[hit], kind="stable")]
    worst = hit[0]
    before = float(norms[worst, -1 - NEW])
    step = moment.line.step
    yield over_time_finding(
        RULE,
        "warning",
        f"The norm of {TENSOR} has begun to grow: from {before:.4g} to {now[worst]:.4g} over the last {NEW} looks, "
        f"{found.by[worst]:.0f} robust deviations above its growth before.",
        step=step,
        first="optimizer",
        tensor=moment.tensors[rows[worst]],
        also=[moment.tensors[rows[i]] for i in hit[1:]],
        evidence={
            "norm": float(now[worst]),
            "norm_before": before,
            "deviations": float(found.by[worst]),
            "rate_per_look": float(found.rate[worst]),
            "tensors": len(hit),
        },
    )
