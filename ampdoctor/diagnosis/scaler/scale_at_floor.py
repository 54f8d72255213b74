"""AMP408: the loss scale is at its floor."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import is_static, living, scale_text, scaler_finding
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register("AMP408", "scale-at-floor", "The loss scale is at its floor", worst="warning", commands=SCANNED)


@RULE.judges(CheckpointSummary)
def _scale_at_floor(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for scaler in living(summary):
        yield from _of(summary, scaler)


def _of(summary: CheckpointSummary, scaler: ScalerState) -> Iterator[Finding]:
    floor = scaler.min_scale
    if floor is None or not 0 < scaler.scale <= floor or is_static(scaler):
        return
    just = scaler.growth_tracker <= 0
    message = (
        f"The loss scale {scale_text(scaler.scale)} is at its floor of {scale_text(floor)}"
        f"{', where an overflow has just put it' if just else f'; {scaler.growth_tracker} steps went well since'}: "
        "at the next one it cannot give way."
    )
    yield scaler_finding(summary, scaler, RULE, "warning" if just else "note", message, {"min_scale": floor})
