"""AMP736: the numbers of a batch are far larger, far smaller, or far more often zero than those of any before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import LENGTH, Course
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FACTOR = Threshold(
    code="AMP736",
    name="factor",
    default=2.0,
    unit="factor",
    lowest=1.1,
    highest=1e9,
    why="By which the root mean square of a batch lies outside of those of the 128 before. It is drawn of 512 numbers "
    "and known within 6 %; another unit, or a missing normalisation, is another factor than two (255, 1/0.226).",
)
DEVIATIONS = Threshold(
    code="AMP736",
    name="deviations",
    default=8.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1e6,
    why="By which it must lie outside of the usual as well: batches of some data differ by factors.",
)
ZEROS = Threshold(
    code="AMP736",
    name="zeros",
    default=0.08,
    unit="share",
    why="By which the share of zeros is above that of any of the 128 batches before, or has come to lie above the "
    "usual: of 512 numbers a share is known within 0.04.",
)
RULE = register(
    "AMP736",
    "batch-changes",
    "A batch is unlike those before",
    worst="warning",
    commands=WATCHED,
    thresholds=(FACTOR, DEVIATIONS, ZEROS),
)

_FAR = 2.5
"""Robust deviations by which the mean of the last 16 shares of zeros must lie above the usual: ten of such a mean."""


@RULE.judges(StepMoment)
def _batch_changes(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    line, batch = moment.line, moment.batch
    rms, zeros = line.batch_rms, line.batch_zero_share
    if rms is None or zeros is None or batch.rms.count < LENGTH or batch.size.other:
        return ()
    outside, more = batch.rms.outside(rms), thresholds[ZEROS]
    if not outside and max(zeros, batch.zeros.highest) - batch.zeros.usual < more:
        return ()  # as most batches; what follows asks for more than that
    what, above = "", batch.rms.above(rms)
    if abs(outside) >= math.log(thresholds[FACTOR]) and abs(above) >= thresholds[DEVIATIONS]:
        what = (
            f"The numbers of the batch of step {line.step} have a root mean square of {rms:.3g}; usual is "
            f"{batch.rms.usual:.3g}, and no batch of late was {'above' if outside > 0 else 'below'} by so much."
        )
    elif zeros - batch.zeros.highest >= more or _more_zeros(batch.zeros) >= more:
        what = (
            f"Of the numbers of the batch of step {line.step}, {zeros:.0%} are zero; usual is "
            f"{batch.zeros.usual:.0%}: look at what the loader gives where it fails to load."
        )
    if not what:
        return ()
    finding = over_time_finding(
        RULE,
        "warning",
        what,
        step=line.step,
        first="data",
        phase="data",
        evidence={
            "rms": rms,
            "usual_rms": batch.rms.usual,
            "deviations": above,
            "zero_share": zeros,
            "usual_zero_share": batch.zeros.usual,
        },
    )
    return (finding,)


def _more_zeros(zeros: Course) -> float:
    """By how much the share of zeros of late is above the one before, where that is out of the usual as well."""
    return zeros.latest - zeros.usual if zeros.lifts()[-1] >= _FAR else 0.0
