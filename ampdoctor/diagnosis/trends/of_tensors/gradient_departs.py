"""AMP728: a tensor's gradient falls away, or grows, as it has not before."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import LEAST_BEFORE, NEW, TensorMoment, breaks
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FALLS = Threshold(
    code="AMP728",
    name="falls",
    default=14.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1e6,
    why="By which a tensor's gradient norm falls faster over the last three looks than over up to twelve before: the "
    "healthy trainings of benchmarks/alerts stay below 11, starved layers reach 10 to 260.",
)
GROWS = Threshold(
    code="AMP728",
    name="grows",
    default=16.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1e6,
    why="Likewise of one that grows: healthy ones stay below 9.",
)
RULE = register(
    "AMP728",
    "gradient-departs",
    "A tensor's gradient falls away or grows",
    worst="warning",
    commands=WATCHED,
    thresholds=(FALLS, GROWS),
)
FLOOR = 0.15
"""Deviation of a rate that is assumed at least, in e-folds a look: gradients of single batches differ by as much."""


@RULE.judges(TensorMoment)
def _gradient_departs(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    rows = moment.rows("gradient")
    if not len(rows):
        return
    norms = moment.values("norm", rows)
    yield from _vanished(moment, rows, norms)
    found = breaks(norms, FLOOR, least=min(thresholds[FALLS], thresholds[GROWS]))
    for grows, limit in ((False, thresholds[FALLS]), (True, thresholds[GROWS])):
        by = found.by if grows else -found.by
        hit = np.flatnonzero(by >= limit)
        if not len(hit):
            continue
        hit = hit[np.argsort(-by[hit], kind="stable")]
        worst = hit[0]
        before, now = float(norms[worst, -1 - NEW]), float(norms[worst, -1])
        yield over_time_finding(
            RULE,
            "warning",
            f"The gradient of {TENSOR} {'grows' if grows else 'falls away'}: its norm went from {before:.3g} to "
            f"{now:.3g} over the last {NEW} looks, {by[worst]:.0f} robust deviations {'above' if grows else 'below'} "
            f"its course before{f', and so did those of {len(hit) - 1} more' if len(hit) > 1 else ''}.",
            step=moment.line.step,
            first="gradient",
            phase="backward",
            tensor=moment.tensors[rows[worst]],
            also=[moment.tensors[rows[i]] for i in hit[1:]],
            evidence={"norm": now, "norm_before": before, "deviations": float(by[worst]), "tensors": len(hit)},
        )


def _vanished(moment: TensorMoment, rows: np.ndarray, norms: np.ndarray) -> Iterator[Finding]:
    """Gradients that are exactly zero in the last looks, for the first time: their logarithm has no rate."""
    before, last = norms[:, :-NEW], norms[:, -NEW:]
    if before.shape[1] < LEAST_BEFORE:
        return
    zero = (last == 0).all(axis=1)
    if not zero.any():
        return
    alive = (before[:, -LEAST_BEFORE:] > 0).all(axis=1) & ~(before == 0).any(axis=1)
    hit = np.flatnonzero(alive & zero)
    if not len(hit):
        return
    was, more = float(before[hit[0], -1]), f"; so have those of {len(hit) - 1} more" if len(hit) > 1 else ""
    yield over_time_finding(
        RULE,
        "warning",
        f"The gradient of {TENSOR} has become zero: every element of it in the last {NEW} looks, after a norm of "
        f"{was:.3g}{more}. Nothing reaches it any more, and "
        "it stops learning.",
        step=moment.line.step,
        first="gradient",
        phase="backward",
        tensor=moment.tensors[rows[hit[0]]],
        also=[moment.tensors[rows[i]] for i in hit[1:]],
        evidence={"norm": 0.0, "norm_before": was, "tensors": len(hit)},
    )
