"""AMP104: values beyond fp16's range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import (
    FP16_MAX,
    MAX_LISTED,
    cast_row,
    castable,
    count_of,
    label,
    tensor_finding,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

RULE = register("AMP104", "beyond-fp16", "Values beyond fp16's range", worst="warning", commands=SCANNED)

FP16_OVERFLOW_AT = 65520.0
"""Halfway between `FP16_MAX` and 65536: from here on rounding to nearest gives Inf."""


@RULE.judges(CheckpointSummary)
def _beyond_fp16(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for tensors in castable(summary):
        beyond = [t for t in tensors if t.amax is not None and t.amax >= FP16_OVERFLOW_AT]
        if beyond:
            yield _beyond(summary, beyond)


def _beyond(summary: CheckpointSummary, beyond: Sequence[TensorSummary]) -> Finding:
    worst = max(beyond, key=lambda t: t.amax or 0.0)
    cast_by_autocast = any(
        t.role == "weight" and len(t.shape) >= 2 and t.dtype in {"float32", "float64"} for t in beyond
    )
    message = (
        f"{count_of(beyond)} values beyond fp16, whose largest number is 65504: up to {worst.amax:.4g} in "
        f"{label(worst)}; a cast to fp16 makes them Inf."
    )
    evidence = {
        "role": worst.role,
        "amax": worst.amax,
        "limit": FP16_MAX,
        "tensors": len(beyond),
        "listed": [cast_row(t, "fp16") for t in beyond[:MAX_LISTED]],
    }
    severity: Severity = "warning" if cast_by_autocast else "note"
    return tensor_finding(summary, RULE, severity, worst, message, evidence, among=beyond, cause=None)
