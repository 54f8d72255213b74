"""AMP737: weights begin to shrink as they have not shrunk before."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import TensorMoment
from ampdoctor.diagnosis.over_time.weight_breaks import moved_first, weight_breaks
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

DEVIATIONS = Threshold(
    code="AMP737",
    name="deviations",
    default=20.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1e6,
    why="By which the growth of a weight's norm over the last one, two or three looks is below that of up to twelve "
    "before: the healthy trainings of benchmarks/alerts stay below 4, gains that decay reach 70 to 160.",
)
CHANGE = Threshold(
    code="AMP737",
    name="change",
    default=0.15,
    unit="e-folds",
    lowest=0.0,
    highest=100.0,
    why="By which the norm must have fallen over these looks.",
)
SHARE = Threshold(
    code="AMP737",
    name="share",
    default=0.1,
    unit="share",
    why="Of the norm of all weights that a tensor must have, or have had before these looks.",
)
RULE = register(
    "AMP737",
    "weights-shrink",
    "Weights begin to shrink",
    worst="warning",
    commands=WATCHED,
    thresholds=(DEVIATIONS, CHANGE, SHARE),
)


@RULE.judges(TensorMoment)
def _weights_shrink(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    found = weight_breaks(
        moment, sign=-1, least=thresholds[DEVIATIONS], share=thresholds[SHARE], change=thresholds[CHANGE]
    )
    if not found:
        return
    worst = found[0]
    yield over_time_finding(
        RULE,
        "warning",
        f"The norm of {TENSOR} has begun to shrink: from {worst.before:.4g} to {worst.now:.4g} over the last "
        f"{'look' if worst.looks == 1 else f'{worst.looks} looks'}, {worst.by:.0f} robust deviations below its growth "
        f"before{f'; so have {len(found) - 1} more' if len(found) > 1 else ''}.",
        step=moment.line.step,
        first=moved_first(moment, worst),
        tensor=moment.tensors[worst.row],
        also=[moment.tensors[one.row] for one in found[1:]],
        evidence={
            "norm": worst.now,
            "norm_before": worst.before,
            "deviations": worst.by,
            "looks": worst.looks,
            "tensors": len(found),
        },
    )
