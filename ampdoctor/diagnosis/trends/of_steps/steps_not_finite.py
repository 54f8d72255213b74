"""AMP722: steps are taken with a loss or a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP722",
    "steps-not-finite",
    "A step was taken with a loss or a gradient that is not finite",
    worst="error",
    commands=WATCHED,
)


@RULE.judges(StepMoment)
def _steps_not_finite(moment: StepMoment, _: Thresholds) -> Sequence[Finding]:
    if moment.bad != 1:
        return ()
    line = moment.line
    of_norm = line.gradient_norm is not None and not math.isfinite(line.gradient_norm)
    value = line.gradient_norm if of_norm else line.loss
    of_loss = line.loss is not None and not math.isfinite(line.loss)
    known = line.skipped is False
    both = (
        f", and the loss {line.loss}: the forward has made it, of its batch or its weights"
        if of_norm and of_loss
        else ""
    )
    finding = over_time_finding(
        RULE,
        "error",
        f"The {'gradient norm' if of_norm else 'loss'} of step {line.step} is {value}"
        f"{', and the step was taken' if known else ''}{both}.",
        step=line.step,
        first=moment.first("forward" if of_loss else "gradient"),
        phase="backward" if of_norm else "loss",
        nonfinite="nan" if value is not None and math.isnan(value) else "inf",
        evidence={"loss": line.loss, "gradient_norm": line.gradient_norm, "skipped": line.skipped},
    )
    return (finding,)
