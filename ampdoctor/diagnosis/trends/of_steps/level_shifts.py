"""AMP724: the loss or the gradient norm climbs, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import SPANS
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.threshold import Threshold

SUM = Threshold(
    code="AMP724",
    name="sum",
    default=11.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Of the loss and the norm together: of the mean of the last 4, 8 or 16 of each above what is usual, in "
    "deviations of such a mean. The healthy trainings of benchmarks/alerts stay below 10.",
)
LOSS = Threshold(
    code="AMP724",
    name="loss",
    default=6.5,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Likewise of the loss alone: healthy ones stay below 5.7.",
)
NORM = Threshold(
    code="AMP724",
    name="norm",
    default=14.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Likewise of the norm alone: healthy ones stay below 12.8; it wanders more than a loss does.",
)
RULE = register(
    "AMP724",
    "level-shifts",
    "The loss or the gradient norm climbs",
    worst="warning",
    commands=WATCHED,
    thresholds=(SUM, LOSS, NORM),
)
IN_A_GAME = 2.0
"""Times the thresholds where several optimizers step: what one wins, the other loses."""


@RULE.judges(StepMoment)
def _level_shifts(moment: StepMoment, thresholds: Thresholds) -> Iterator[Finding]:
    if not moment.judged or moment.rising:
        return
    times = 1.0 if moment.alone else IN_A_GAME
    losses, norms = moment.loss.lifts(), moment.norm.lifts()
    by_sum, by_loss, by_norm = (
        (max(lifts) / (times * thresholds[least]), least)
        for lifts, least in (
            ([max(loss, 0.0) + max(norm, 0.0) for loss, norm in zip(losses, norms, strict=True)], SUM),
            (losses, LOSS),
            (norms, NORM),
        )
    )
    worst, least = max(by_sum, by_loss, by_norm, key=lambda one: one[0])
    if worst < 1.0:
        return
    loss, norm = max(losses), max(norms)
    of_norm = norm >= loss
    course, what, now = (
        (moment.norm, "gradient norm", moment.norm.latest) if of_norm else (moment.loss, "loss", moment.loss.latest)
    )
    yield over_time_finding(
        RULE,
        "warning",
        f"The {'loss and the gradient norm have' if least is SUM else f'{what} has'} climbed: the {what} of the last "
        f"{SPANS[0]} steps is {now:.4g}, usual is {course.usual:.4g} (loss {loss:+.1f} robust deviations, gradient "
        f"norm {norm:+.1f}, of means of up to {SPANS[-1]} steps).",
        step=moment.line.step,
        first="gradient" if least is NORM else moment.first(),
        phase="backward" if of_norm else "loss",
        evidence={"norm_lift": norm, "loss_lift": loss, "latest": now, "usual": course.usual},
    )
