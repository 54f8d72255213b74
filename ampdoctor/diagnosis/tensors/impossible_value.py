"""AMP106: a value that cannot be, a negative variance or second moment."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import (
    MAX_FINDINGS,
    address,
    label,
    numbers,
    rest_finding,
    state_place,
    tensor_finding,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

BATCH_NORM_EPSILON = Threshold(
    code="AMP106",
    name="epsilon",
    default=1e-5,
    unit="magnitude",
    why="A running_var down to its negative is a warning: torch's default epsilon of BatchNorm keeps the root real.",
)
RULE = register(
    "AMP106",
    "impossible-value",
    "A value that cannot be: a negative variance or second moment",
    worst="error",
    commands=SCANNED,
    thresholds=(BATCH_NORM_EPSILON,),
    ruins_checkpoint=True,
)


@RULE.judges(CheckpointSummary)
def _impossible_value(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    def severity_of(tensor: TensorSummary) -> Severity:
        harmless = tensor.entry == "running_var" and (tensor.lowest or 0.0) >= -thresholds[BATCH_NORM_EPSILON]
        return "warning" if harmless else "error"

    negative = [t for t in summary.tensors if t.negatives and t.lowest is not None]
    for tensor in negative[:MAX_FINDINGS]:
        lowest = tensor.lowest or 0.0
        message = (
            f"{label(tensor)} cannot be negative, and {tensor.negatives} of its {tensor.examined} values are, "
            f"down to {lowest:.4g}."
        )
        evidence = {**numbers(tensor), "negatives": tensor.negatives, "lowest": lowest}
        yield tensor_finding(summary, RULE, severity_of(tensor), tensor, message, evidence)
    severity: Severity = "error" if "error" in map(severity_of, negative[MAX_FINDINGS:]) else "warning"
    yield from rest_finding(summary, RULE, severity, negative, "hold negative values, and cannot")
    below = [t for t in summary.indices if t.lowest < 0]
    for at, counter in enumerate(below[: MAX_FINDINGS + 1]):
        others = below[at + 1 :] if at == MAX_FINDINGS else []
        more = f" {len(others)} more do so." if others else ""
        yield checkpoint_finding(
            summary,
            RULE,
            "warning",
            f"{address(counter)} counts down to {counter.lowest:.6g}, and a count cannot be negative.{more}",
            evidence={"dtype": counter.dtype, "shape": list(counter.shape), "lowest": counter.lowest},
            module=counter.module,
            op=f"state:{counter.entry}",
            tensor=address(counter),
            file=counter.file,
            also=map(state_place, others),
            cause="bad_checkpoint",
        )
