"""AMP410: an fp16 training state without a loss scaler."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

MOSTLY_FLUSHED = Threshold(
    code="AMP410",
    name="zeros",
    default=0.5,
    unit="share",
    why="Share of zeros in the first moments of the median matrix from which it is a warning: half, which sparse "
    "gradients of embeddings do not reach in the median.",
)
RULE = register(
    "AMP410",
    "missing-scaler",
    "An fp16 training state without a loss scaler",
    worst="warning",
    commands=SCANNED,
    thresholds=(MOSTLY_FLUSHED,),
)

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})
"""State that is zero where no gradient ever arrived."""


@RULE.judges(CheckpointSummary)
def _missing_scaler(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group and len(t.shape) >= 2 and t.examined]
    moments = [t for t in summary.tensors if t.role == "moment" and t.entry in FIRST_MOMENTS and len(t.shape) >= 2]
    if not weights or not moments or any(t.dtype != "float16" for t in weights):
        return
    if summary.scalers or any(entry.scale is not None for entry in summary.log):
        return
    halves = all(t.dtype == "float16" for t in moments)
    zeros = statistics.median(t.zeros / max(t.counted, 1) for t in moments)
    flushed = halves and zeros >= thresholds[MOSTLY_FLUSHED]
    where = (
        "its moments too, so its gradients were not scaled by a GradScaler, which refuses fp16 weights"
        if halves
        else "the state of their scaler was not saved, or their scale is fixed"
    )
    message = f"An fp16 model's training state is without a loss scaler: weights are in fp16, and {where}."
    if flushed:
        message += f" In half of the matrices at least {100 * zeros:.3g} % of the first moments are exactly zero."
    yield checkpoint_finding(
        summary,
        RULE,
        "warning" if flushed else "note",
        message,
        evidence={"weights": len(weights), "moments_dtype": moments[0].dtype, "zero_first_moments": zeros},
        op="scaler_state",
        file=weights[0].file,
        cause="grad_underflow" if flushed else None,
    )
