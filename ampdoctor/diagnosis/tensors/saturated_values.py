"""AMP107: values clamped to the stored format's largest number."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import (
    FP16_MAX,
    MAX_FINDINGS,
    is_mask,
    label,
    numbers,
    rest_finding,
    tensor_finding,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

SATURATED_8_BIT = Threshold(
    code="AMP107",
    name="saturated",
    default=1 / 16,
    unit="share",
    why="Share of an 8-bit tensor's elements at the format's maximum: twice the one in 32 that block scaling leaves.",
)
RULE = register(
    "AMP107",
    "saturated-values",
    "Values clamped to the stored format's largest number",
    worst="error",
    commands=SCANNED,
    thresholds=(SATURATED_8_BIT,),
)


@RULE.judges(CheckpointSummary)
def _saturated_values(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    share = thresholds[SATURATED_8_BIT]
    clamped = [
        t
        for t in summary.tensors
        if t.role in {"weight", "buffer", "ema", "moment"} and t.at_max and not is_mask(t) and _too_many(t, share)
    ]
    for tensor in clamped[:MAX_FINDINGS]:
        message = (
            f"{tensor.at_max} of {tensor.examined} values of {label(tensor)} are exactly {tensor.amax:.6g}, "
            f"the largest {tensor.dtype} number: they were clamped."
        )
        yield tensor_finding(summary, RULE, "warning", tensor, message, {**numbers(tensor), "at_max": tensor.at_max})
    yield from rest_finding(summary, RULE, "warning", clamped, "were clamped to their format's largest number")
    before = [t for t in summary.tensors if _clamped_before(t)]
    for tensor in before[:MAX_FINDINGS]:
        message = (
            f"The largest value of {label(tensor)} is exactly 65504, fp16's largest number, in a {tensor.dtype} "
            "tensor: it was clamped to fp16 and stored wider."
        )
        yield tensor_finding(summary, RULE, "warning", tensor, message, numbers(tensor))
    yield from rest_finding(summary, RULE, "warning", before, "were clamped to fp16 and stored wider")


def _clamped_before(tensor: TensorSummary) -> bool:
    """A matrix or vector of weights whose largest magnitude is fp16's maximum, in a format where that is no limit."""
    return (
        tensor.role in {"weight", "ema"}
        and tensor.dtype in {"float32", "float64"}
        and tensor.amax == FP16_MAX
        and tensor.examined > 1
        and tensor.constant is None
        and not is_mask(tensor)
    )


def _too_many(tensor: TensorSummary, share: float) -> bool:
    """Of a float8 tensor this share; of a wider one a single element."""
    return not tensor.dtype.startswith("float8") or tensor.at_max > share * tensor.examined
