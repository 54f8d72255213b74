"""AMP742: the loss scale is no number by which a loss can be scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP742",
    "no-such-scale",
    "The loss scale is not a positive finite number",
    worst="error",
    commands=WATCHED,
)


@RULE.judges(StepMoment)
def _no_such_scale(moment: StepMoment, _: Thresholds) -> Sequence[Finding]:
    wrong = moment.scale.wrong
    if wrong is None:
        return ()
    if math.isnan(wrong) and (moment.end is None or moment.scale.wrong_rows <= moment.scale.wrong_before):
        return ()  # it may stand for a number that is not logged at each step, as a scale that follows shows
    since = moment.scale.wrong_since
    finding = over_time_finding(
        RULE,
        "error",
        f"The loss scale is {wrong:g} from step {since} on: "
        f"{'gradients divided by it are lost' if wrong == 0 or not math.isfinite(wrong) else 'no scaler gives it'}.",
        step=since,
        first="scale",
        phase="scaler",
        evidence={"scale": wrong, "last_scale": moment.scale.now},
    )
    return (finding,)
