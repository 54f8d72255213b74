"""AMP735: the same few batches come again and again, after many that were new."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

STEPS = Threshold(
    code="AMP735",
    name="steps",
    default=4,
    unit="steps",
    lowest=2,
    highest=10_000,
    why="In a row whose batch came within the last sixteenth of the new ones before: a second epoch comes after as "
    "many as the first one had, and batches that a loop uses several times by intent never were new in a row for long. "
    "Two or three in a row are a step that was tried again.",
)
NEW = Threshold(
    code="AMP735",
    name="new",
    default=64,
    unit="steps",
    lowest=1,
    highest=1e6,
    why="In a row whose batch was new, before the first that came again: a training on a few batches by intent begins "
    "with them.",
)
RULE = register(
    "AMP735",
    "data-repeats",
    "The same few batches come again and again",
    worst="warning",
    commands=WATCHED,
    thresholds=(STEPS, NEW),
)


@RULE.judges(StepMoment)
def _data_repeats(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    repeats = moment.batch.repeats
    if not repeats.steps:
        return ()
    steps = int(thresholds[STEPS])
    if repeats.steps != steps or repeats.new_before < thresholds[NEW]:
        return ()
    step = moment.line.step
    finding = over_time_finding(
        RULE,
        "warning",
        f"The batch of step {step} is that of {_ago(repeats.cycle)}, and so it was in the last {steps} steps; "
        f"{repeats.new_before} before them were all new.",
        step=step,
        first="data",
        phase="data",
        evidence={"cycle": repeats.cycle, "new_before": repeats.new_before},
    )
    return (finding,)


def _ago(steps: int) -> str:
    return "the step before" if steps == 1 else f"{steps} steps before"
