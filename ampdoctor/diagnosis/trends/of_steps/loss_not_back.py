"""AMP721: a loss that left what was usual and has not come back."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

STEPS = Threshold(
    code="AMP721",
    name="steps",
    default=20,
    unit="steps",
    lowest=2,
    highest=10_000,
    why="In a row above the usual by three robust deviations, after a spike of six: a spike that does harm stays, one "
    "that does not is back within ten steps or so (BLOOM's, PaLM's).",
)
RULE = register(
    "AMP721",
    "loss-not-back",
    "The loss has jumped and not come back",
    worst="error",
    commands=WATCHED,
    thresholds=(STEPS,),
)


@RULE.judges(StepMoment)
def _loss_not_back(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    spike = moment.spike
    if spike is None:
        return ()
    steps = int(thresholds[STEPS])
    if spike.above != steps:
        return ()
    line = moment.line
    finding = over_time_finding(
        RULE,
        "error",
        f"The loss rose to {spike.value:.4g} at step {spike.step}, from about {spike.usual:.4g}, and {steps} steps "
        f"later it is still {line.loss:.4g}: above {spike.limit:.4g} in each of them.",
        step=line.step,
        first=moment.first(since=spike.step),
        phase="loss",
        evidence={
            "since": spike.step,
            "at_first": spike.value,
            "usual": spike.usual,
            "limit": spike.limit,
            "loss": line.loss,
        },
    )
    return (finding,)
