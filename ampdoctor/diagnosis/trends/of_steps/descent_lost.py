"""AMP739: the loss has given back much of what it had learned, however slowly."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import HOP, LENGTH
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

SHARE = Threshold(
    code="AMP739",
    name="share",
    default=0.5,
    unit="share",
    why="Of the way from the highest usual loss to the lowest that the usual loss has gone back up. Trainings that "
    "were ruined went back by 0.48 to 1; healthy ones by 0.22 at most, and by 0.47 where their task was changed.",
)
RULE = register(
    "AMP739",
    "descent-lost",
    "The loss has given back what it had learned",
    worst="warning",
    commands=WATCHED,
    thresholds=(SHARE,),
)


@RULE.judges(StepMoment)
def _descent_lost(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    if moment.loss.count % HOP or moment.loss.count < LENGTH or not moment.alone:
        return ()  # what is usual changes once a hop
    descent, usual = moment.descent, moment.loss.usual
    way = descent.fallen_from - descent.lowest
    if not descent.falls or usual - descent.lowest < thresholds[SHARE] * way:
        return ()
    share = (usual - descent.lowest) / way
    finding = over_time_finding(
        RULE,
        "warning",
        f"The loss is back at {usual:.4g}, after {descent.lowest:.4g} at its lowest: {share:.0%} of the way that it "
        f"had come down from {descent.fallen_from:.4g} is lost.",
        step=moment.line.step,
        first=moment.first("data"),
        phase="loss",
        evidence={"usual": usual, "lowest": descent.lowest, "highest": descent.fallen_from, "share": share},
    )
    return (finding,)
