"""AMP729: the learning rate jumps to where it has not been."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.course import LEAST
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.threshold import Threshold

FACTOR = Threshold(
    code="AMP729",
    name="factor",
    default=3.0,
    unit="factor",
    lowest=1.1,
    highest=1e9,
    why="From one step to the next, and above every rate before: a warm-up goes step by step, a restart comes back to "
    "a rate that was there. Half a decade of learning rates lies between good and diverging.",
)
RULE = register(
    "AMP729",
    "schedule-jumps",
    "The learning rate jumps",
    worst="warning",
    commands=WATCHED,
    thresholds=(FACTOR,),
)


@RULE.judges(StepMoment)
def _schedule_jumps(moment: StepMoment, thresholds: Thresholds) -> Iterator[Finding]:
    before, now = moment.rate_before, moment.rate
    if not (before > 0 and moment.accepted >= LEAST and now >= thresholds[FACTOR] * max(before, moment.highest_rate)):
        return
    step = moment.line.step
    yield over_time_finding(
        RULE,
        "warning",
        f"The learning rate jumps from {before:.3g} to {now:.3g} at step {step}, {now / before:.3g} times, and above "
        "every rate before.",
        step=step,
        first="optimizer",
        evidence={"before": before, "now": now, "highest_before": moment.highest_rate},
    )
