"""Findings and headline checks that follow from measured ranges alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampdoctor.diagnosis.ranges.gradient_underflow import underflow_expected
from ampdoctor.diagnosis.ranges.nonfinite_in_fp32 import nonfinite_in_fp32
from ampdoctor.evidence.of_runs.ranges import GRADIENTS
from ampdoctor.evidence.report import Check, Finding
from ampdoctor.ranges.profile import figures

if TYPE_CHECKING:
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.ranges.profile import RangeProfile


def range_findings(ranges: RangeProfile, thresholds: Thresholds) -> list[Finding]:
    """Returns the findings that follow from ranges alone; for a bf16 or fp32 run, only whether it is finite."""
    if ranges.nonfinite_steps:
        return [nonfinite_in_fp32(ranges.nonfinite_steps)]
    if ranges.run.precision != "fp16":
        return []
    scale = ranges.run.loss_scale
    activation, weight = (figures(ranges.merged(kind), "fp16", ranges.factor(kind, scale)) for kind in GRADIENTS)
    bf16 = figures(ranges.merged("activation_grad"), "bf16", ranges.factor("activation_grad", 1.0))
    measured = next((s.relative_error for s in ranges.shadows if s.scale == scale), None)
    found = underflow_expected(activation, weight, scale, bf16, thresholds, measured=measured)
    return [] if found is None else [found]


def range_checks(ranges: RangeProfile) -> tuple[Check, ...]:
    """Returns the headline: the share of gradients that flush in fp16, at the run's scale and without, beside bf16."""
    checks = [
        Check(
            name="gradients finite in fp32",
            result="found" if ranges.nonfinite_steps else "ok",
            headroom={"steps": ranges.steps},
        )
    ]
    for kind in GRADIENTS:
        histogram, name = ranges.merged(kind), f"{kind.replace('_', ' ')} underflow, fp16 against bf16"
        if not histogram.counts.any():
            none = "is finite and nonzero" if histogram.numel else "is half"
            checks.append(Check(name=name, result=f"not measured: no such gradient {none}"))
            continue
        checks.append(
            Check(
                name=name,
                result="measured",
                headroom={
                    "fp16": histogram.flushed("fp16", ranges.factor(kind, ranges.run.loss_scale)),
                    "fp16_unscaled": histogram.flushed("fp16", ranges.factor(kind, 1.0)),
                    "bf16": histogram.flushed("bf16", ranges.factor(kind, 1.0)),
                    "loss_scale": ranges.run.loss_scale,
                    "true_zeros": histogram.zeros / histogram.numel,
                },
            )
        )
    return tuple(checks)
