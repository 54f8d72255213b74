"""AMP711: the loss scale keeps falling."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import scale_text
from ampdoctor.diagnosis.several.growing_range import LEAST_POINTS
from ampdoctor.diagnosis.several.growth import course
from ampdoctor.evidence.checkpoint_stats import Trend
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

SCALE_FALL = Threshold(
    code="AMP711",
    name="fall",
    default=4.0,
    unit="binades",
    lowest=0.0,
    highest=150.0,
    why="Binades that a loss scale falls before it is called falling: a settled one goes up and down by one or two.",
)
RULE = register(
    "AMP711",
    "falling-loss-scale",
    "The loss scale keeps falling",
    worst="warning",
    commands=SCANNED,
    thresholds=(SCALE_FALL,),
)


@RULE.judges(Trend)
def _falling_loss_scale(trend: Trend, thresholds: Thresholds) -> Iterator[Finding]:
    points, unit = trend.dated, trend.unit
    scales = {p.step or 0: p.scale for p in points if p.scale is not None and 0 < p.scale < math.inf}
    seen = list(scales.items())
    top = max((scale for _, scale in seen), default=0.0)
    start = max((at for at, (_, scale) in enumerate(seen) if scale == top), default=0)
    seen = seen[start:]
    if len(seen) < LEAST_POINTS or math.log2(top) - math.log2(seen[-1][1]) < thresholds[SCALE_FALL]:
        return
    heading = course(seen, 1.0)
    if heading is None or not heading.soon:
        return
    message = (
        f"The loss scale has fallen from {scale_text(top)} at {unit} {heading.since} to {scale_text(seen[-1][1])} at "
        f"{unit} {heading.until}; at this rate it is below 1 at about {unit} {math.ceil(heading.meets)}."
    )
    yield Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning",
        message=message,
        where=Where(phase="checkpoint", global_step=heading.until, op="scaler_state"),
        evidence={
            "scales": [{"step": step, "scale": scale} for step, scale in seen],
            "meets_at": heading.meets,
            "binades_per_1000": 1000 * heading.rate,
        },
        help=RULE.page.action,
    )
