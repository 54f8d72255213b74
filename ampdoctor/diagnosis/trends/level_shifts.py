"""AMP724: the loss or the gradient norm climbs, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import HOP, LENGTH, RECENT
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.threshold import Threshold

NORM = Threshold(
    code="AMP724",
    name="norm",
    default=4.5,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="By which the median of the last 16 gradient norms is above the 112 before: the healthy trainings of "
    "benchmarks/alerts stay below 2.8.",
)
LOSS = Threshold(
    code="AMP724",
    name="loss",
    default=5.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Likewise of the loss: healthy ones stay below 3.6.",
)
BOTH = Threshold(
    code="AMP724",
    name="both",
    default=3.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Of the loss and the norm at the same time: healthy ones stay below 2.2.",
)
RULE = register(
    "AMP724",
    "level-shifts",
    "The loss or the gradient norm climbs",
    worst="warning",
    commands=WATCHED,
    thresholds=(NORM, LOSS, BOTH),
)


@RULE.judges(StepMoment)
def _level_shifts(moment: StepMoment, thresholds: Thresholds) -> Iterator[Finding]:
    if not moment.judged or moment.rising or moment.accepted % HOP:
        return
    norm = moment.norm.shift if moment.norm.count >= LENGTH else 0.0
    loss = moment.loss.shift if moment.loss.count >= LENGTH else 0.0
    both = min(norm, loss) >= thresholds[BOTH]
    if not both and norm < thresholds[NORM] and loss < thresholds[LOSS]:
        return
    of_norm = norm >= thresholds[NORM] and norm >= loss
    course, what = (moment.norm, "gradient norm") if of_norm else (moment.loss, "loss")
    yield over_time_finding(
        RULE,
        "warning",
        f"The {'loss and the gradient norm have' if both else f'{what} has'} climbed: the {what} of the last {RECENT} "
        f"steps is {course.recent:.4g}, of the {LENGTH - RECENT} before {course.usual:.4g} ({max(norm, loss):.1f} "
        "robust deviations).",
        step=moment.line.step,
        first="gradient" if of_norm and not both else moment.first(),
        phase="backward" if of_norm else "loss",
        evidence={
            "norm_shift": norm,
            "loss_shift": loss,
            "recent": course.recent,
            "usual": course.usual,
        },
    )
