"""AMP105: a cast to half precision would lose small values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import (
    MAX_LISTED,
    cast_row,
    castable,
    count_of,
    label,
    percent,
    tensor_finding,
)
from ampdoctor.evidence.checkpoint_stats import CastLoss, CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

LOSSY_CAST = Threshold(
    code="AMP105",
    name="relative_error",
    default=2.0**-8,
    unit="relative L2 error",
    why="A cast that changes a tensor by more is reported: the largest error that bf16 makes in one normal number.",
)
ERASED_BY_CAST = Threshold(
    code="AMP105",
    name="erased",
    default=0.5,
    unit="share",
    why="Share of a matrix's nonzero elements from which their becoming zero is a warning and no note: half.",
)
RULE = register(
    "AMP105",
    "lossy-cast",
    "A cast to half precision would lose small values",
    worst="warning",
    commands=SCANNED,
    thresholds=(LOSSY_CAST, ERASED_BY_CAST),
)

_HALF = ("fp16", "bf16")
"""Formats that a cast without a scale is judged for (AMP105); fp8 is never cast to without one."""


@RULE.judges(CheckpointSummary)
def _lossy_cast(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    most = thresholds[LOSSY_CAST]
    for tensors in castable(summary):
        lossy = [(t, loss) for t in tensors for loss in t.casts if loss.format in _HALF and _loses(loss, most)]
        if lossy:
            yield _lossy(summary, lossy, thresholds)


def _lossy(
    summary: CheckpointSummary, lossy: Sequence[tuple[TensorSummary, CastLoss]], thresholds: Thresholds
) -> Finding:
    worst, loss = max(lossy, key=lambda pair: pair[1].relative_error)
    names = sorted({found.format for _, found in lossy}, reverse=True)
    tensors = list({id(t): t for t, _ in lossy}.values())
    erased = any(len(t.shape) >= 2 and found.flushed >= thresholds[ERASED_BY_CAST] for t, found in lossy)
    message = (
        f"A cast to {' or '.join(names)} would change {count_of(tensors, verb='')} by more than "
        f"{_bound(thresholds[LOSSY_CAST])}, most of all {label(worst)}: in {loss.format} {percent(loss.flushed)} of "
        f"its nonzero values become zero, {percent(loss.subnormal)} subnormal, relative error "
        f"{loss.relative_error:.2g}{_sampled(worst)}."
    )
    evidence = {"role": worst.role, "tensors": len(tensors)} | {
        name: [cast_row(t, name) for t, found in lossy if found.format == name][:MAX_LISTED] for name in names
    }
    severity: Severity = "warning" if erased else "note"
    return tensor_finding(summary, RULE, severity, worst, message, evidence, among=tensors, cause=None)


def _sampled(tensor: TensorSummary) -> str:
    """A word on where shares come from, where not every element was counted."""
    if tensor.counted >= tensor.examined:
        return ""
    return f" (from a sample of 1 in {round(tensor.examined / max(tensor.counted, 1))}; --exact counts all)"


def _bound(most: float) -> str:
    return "bf16's own rounding" if most == LOSSY_CAST.default else f"a relative error of {most:.3g}"


def _loses(loss: CastLoss, most: float) -> bool:
    """Overflow in fp16 is AMP104's affair and would drown the rest: its error is infinite."""
    return loss.relative_error > most and not (loss.format == "fp16" and loss.overflowed)
