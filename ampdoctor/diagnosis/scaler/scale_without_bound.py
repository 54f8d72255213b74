"""AMP409: the loss scale has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import is_static, living, scale_text, scaler_finding
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

HIGHEST_SETTLED = Threshold(
    code="AMP409",
    name="scale",
    default=2.0**33,
    unit="loss scale",
    lowest=1.0,
    highest=2.0**127,
    why="Above every scale that a framework starts with; Megatron's 2^32 is the highest.",
)
RULE = register(
    "AMP409",
    "scale-without-bound",
    "The loss scale has nothing to do",
    worst="note",
    commands=SCANNED,
    thresholds=(HIGHEST_SETTLED,),
)


@RULE.judges(CheckpointSummary)
def _scale_without_bound(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    for scaler in living(summary):
        yield from _of(summary, scaler, thresholds[HIGHEST_SETTLED])


def _of(summary: CheckpointSummary, scaler: ScalerState, highest: float) -> Iterator[Finding]:
    if scaler.scale < highest or is_static(scaler):
        return
    largest = FP16_MAX / scaler.scale
    message = (
        f"The loss scale is {scale_text(scaler.scale)} and no step overflows: either every gradient in fp16 is "
        f"below {largest:.2g}, or none is computed in fp16, and the scaler has nothing to do."
    )
    yield scaler_finding(summary, scaler, RULE, "note", message, {"largest_gradient": largest})
