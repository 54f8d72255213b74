"""AMP724: the loss or the gradient norm climbs, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import LENGTH, MOST, SPANS
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

SUM = Threshold(
    code="AMP724",
    name="sum",
    default=12.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Of the loss and the norm together: of the mean of the last 4, 8 or 16 of each above what is usual, in "
    "deviations of such a mean. The healthy trainings of benchmarks/alerts stay below 9.3.",
)
LOSS = Threshold(
    code="AMP724",
    name="loss",
    default=6.8,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Likewise of the loss alone: healthy ones stay below 5.8.",
)
NORM = Threshold(
    code="AMP724",
    name="norm",
    default=3.8,
    unit="robust standard deviations",
    lowest=0.5,
    highest=MOST,
    why="Of the norm alone, in deviations of one value, because a norm wanders: its mean over 16 steps is no nearer to "
    "the usual than one over 8, and over fewer it is not asked. Not while the loss falls. Healthy ones stay below 3.6; "
    "one value counts 5 at most.",
)
RULE = register(
    "AMP724",
    "level-shifts",
    "The loss or the gradient norm climbs",
    worst="warning",
    commands=WATCHED,
    thresholds=(SUM, LOSS, NORM),
)
_ROOTS = [math.sqrt(span) for span in SPANS]
_BOTH = 3.0
"""Deviations of its mean by which the loss itself must be above the usual for the two to have climbed together: a norm
that climbs under a loss that does not is told by its own threshold."""
_LONG = _ROOTS[1]
"""Of the norm alone, only means over 8 steps and more: four large norms in a row are a burst, as PPO has in health
where its returns grow, and what jumps is AMP720's to tell."""
_FALLS = -1.0
"""Deviations below the usual from which a loss falls: a norm that rises with it belongs to a phase of fast learning."""


@RULE.judges(StepMoment)
def _level_shifts(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.judged or moment.rising or not moment.alone or moment.loss.count < LENGTH:
        return ()  # where several optimizers step, what one wins, another loses
    loss, norm = moment.loss.height(), moment.norm.height()
    if (
        loss + norm < _ROOTS[0] * thresholds[SUM]
        and loss < _ROOTS[0] * thresholds[LOSS]
        and norm < SPANS[1] * thresholds[NORM]
    ):
        return ()  # as at most steps: all that lies above the usual is not enough for the shortest span
    losses, norms = moment.loss.lifts(), moment.norm.lifts()
    if not moment.moves(moment.norm.latest):
        norms = tuple(0.0 for _ in norms)
    learned = moment.has_learned
    matters, of_spans = moment.undoes(moment.loss.latest), list(zip(_ROOTS, losses, norms, strict=True))
    of_both, of_loss, of_norm = (
        max(lifts, default=0.0) / thresholds[least]
        for lifts, least in (
            ([matters * root * (loss + norm) for root, loss, norm in of_spans if root * loss >= _BOTH], SUM),
            ([matters * root * loss for root, loss, _ in of_spans], LOSS),
            ([norm for root, loss, norm in of_spans if learned and loss > _FALLS and root >= _LONG], NORM),
        )
    )
    worst = max(of_both, of_loss, of_norm)
    if worst < 1.0:
        return ()
    loss, norm = max(losses), max(norms)
    course, what = (moment.norm, "gradient norm") if norm > loss else (moment.loss, "loss")
    finding = over_time_finding(
        RULE,
        "warning",
        f"The {'loss and the gradient norm have' if worst == of_both else f'{what} has'} climbed: the {what} of the "
        f"last {SPANS[0]} steps is {course.latest:.4g}, usual is {course.usual:.4g} (over up to {SPANS[-1]} steps, in "
        f"robust deviations, of which a step counts {MOST:.0f} at most: loss {loss:+.1f}, gradient norm {norm:+.1f}).",
        step=moment.line.step,
        first=moment.first("gradient" if norm > loss else "data"),
        phase="backward" if norm > loss else "loss",
        evidence={"loss_lift": loss, "norm_lift": norm, "latest": course.latest, "usual": course.usual},
    )
    return (finding,)
