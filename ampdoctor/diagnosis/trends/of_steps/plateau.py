"""AMP731: the loss stands, while gradients do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

STEPS = Threshold(
    code="AMP731",
    name="steps",
    default=2000,
    unit="steps",
    lowest=200,
    highest=10_000_000,
    why="Without a lower loss, each mean of 200 held against the one before. A note only: a run at the end of its "
    "learning does the same.",
)
RULE = register(
    "AMP731",
    "plateau",
    "The loss stands while the gradients do not vanish",
    worst="note",
    commands=WATCHED,
    thresholds=(STEPS,),
)


@RULE.judges(StepMoment)
def _plateau(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    stretch = moment.plateau
    if not stretch.steps or stretch.told or stretch.steps < thresholds[STEPS] or math.isnan(stretch.best):
        return ()
    stretch.told = True
    falling = stretch.norm_now < 0.5 * stretch.norm_then
    finding = over_time_finding(
        RULE,
        "note",
        f"The loss has not fallen below {stretch.best:.4g} for {stretch.steps} steps; the gradient norm "
        f"{'has fallen' if falling else 'has not'}, from {stretch.norm_then:.3g} to {stretch.norm_now:.3g}: "
        f"{'it has converged, or saturated' if falling else 'it still pushes, and gets nowhere'}.",
        step=moment.line.step,
        first="gradient" if falling else "optimizer",
        phase="loss",
        evidence={
            "best": stretch.best,
            "steps": stretch.steps,
            "norm_before": stretch.norm_then,
            "norm": stretch.norm_now,
        },
    )
    return (finding,)
