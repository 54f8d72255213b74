"""AMP401: the loss scaler is dead."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import fresh_scaler, scale_text, scaler_finding
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, CheckpointSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP401", "dead-scaler", "The loss scaler is dead", worst="error", commands=SCANNED, ruins_checkpoint=True
)


def dead_words(scale: float) -> str:
    """What a dead scale does, as the rest of a sentence about it."""
    if math.isfinite(scale):
        return (
            f"{scale_text(scale)}, so 1/scale is infinite: the next step without an overflow writes Inf or NaN into "
            "the weights"
        )
    return f"{scale_text(scale)}: every step is skipped for ever"


@RULE.judges(CheckpointSummary)
def _dead_scaler(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for scaler in summary.scalers:
        if scaler.dead:
            yield scaler_finding(
                summary,
                scaler,
                RULE,
                "error",
                f"The loss scale is {dead_words(scaler.scale)}.",
                {"limit": DEAD_SCALE},
                cause="bad_checkpoint",
                born="nan" if math.isnan(scaler.scale) else "inf",
                prescription=fresh_scaler(),
            )
