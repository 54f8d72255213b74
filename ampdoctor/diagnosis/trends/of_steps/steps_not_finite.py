"""AMP722: steps are taken with a loss or a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.ill_steps import LEAST_ROWS
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
    line = moment.ill.lost
    undecided = line is None and moment.ill.last
    if undecided:
        line = moment.ill.waiting
    if line is None:
        return ()
    of_norm = line.gradient_norm is not None and not math.isfinite(line.gradient_norm)
    value = line.gradient_norm if of_norm else line.loss
    of_loss = line.loss is not None and not math.isfinite(line.loss)
    if undecided and not of_loss and moment.scale.in_a_row >= LEAST_ROWS:
        return ()  # the last of many that were skipped; or of norms that are never measured
    may_be_skipped = undecided and not (of_loss and moment.scale.now is None)
    said = ", and the step was taken" if line.skipped is False else ""
    if of_norm and of_loss:
        said += f", and the loss {line.loss}: the forward has made it, of its batch or its weights"
    elif line is not moment.line and line.skipped is None and not undecided:
        said += f", and no finite {'norm' if moment.line.loss is None else 'loss'} follows: the weights took it"
    if may_be_skipped:
        said += "; no step follows in the log: either a scaler has skipped it, as it should, or the weights are lost"
    finding = over_time_finding(
        RULE,
        "warning" if may_be_skipped else "error",
        f"The {'gradient norm' if of_norm else 'loss'} of step {line.step} is {value}{said}.",
        step=line.step,
        first=moment.first("forward" if of_loss else "gradient", since=line.step),
        phase="backward" if of_norm else "loss",
        nonfinite="nan" if value is not None and math.isnan(value) else "inf",
        evidence={"loss": line.loss, "gradient_norm": line.gradient_norm, "skipped": line.skipped},
    )
    return (finding,)
