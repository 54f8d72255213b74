"""AMP732: the training loss falls at once, as where batches repeat."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import HOP, LENGTH, RECENT
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

DEVIATIONS = Threshold(
    code="AMP732",
    name="deviations",
    default=6.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="By which the median of the last 16 losses is below the 112 before. A note only: a curriculum, a phase of "
    "fast learning and a lower learning rate do the same.",
)
RULE = register(
    "AMP732",
    "loss-falls",
    "The training loss falls at once",
    worst="note",
    commands=WATCHED,
    thresholds=(DEVIATIONS,),
)


@RULE.judges(StepMoment)
def _loss_falls(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    loss = moment.loss
    if not moment.judged or moment.accepted % HOP or loss.count < LENGTH or loss.shift > -thresholds[DEVIATIONS]:
        return ()
    finding = over_time_finding(
        RULE,
        "note",
        f"The training loss has fallen at once, from {loss.usual:.4g} to {loss.recent:.4g} over {RECENT} steps "
        f"({-loss.shift:.1f} robust deviations): good news, or batches that repeat.",
        step=moment.line.step,
        first="data",
        phase="data",
        evidence={"usual": loss.usual, "recent": loss.recent, "deviations": -loss.shift},
    )
    return (finding,)
