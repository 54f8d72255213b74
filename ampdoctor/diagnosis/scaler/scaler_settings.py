"""AMP404: loss scaler settings that are accepted but cannot work."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import is_static, living, scale_text, scaler_finding
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP404",
    "scaler-settings",
    "Loss scaler settings that are accepted but cannot work",
    worst="error",
    commands=SCANNED,
)


def wrong_settings(scaler: ScalerState) -> dict[str, str]:
    """By GradScaler argument (or "growth_tracker"): what cannot work about it, as a clause."""
    wrong = {}
    if not 0 < scaler.backoff_factor < 1 and not is_static(scaler):
        wrong["backoff_factor"] = f"backoff_factor {scaler.backoff_factor:g} is not between 0 and 1"
    if not 1 <= scaler.growth_factor < math.inf:
        wrong["growth_factor"] = f"growth_factor {scaler.growth_factor:g} is not a number of at least 1"
    if scaler.growth_interval <= 0:
        wrong["growth_interval"] = f"growth_interval {scaler.growth_interval} never comes round"
    if scaler.scale < 0:
        wrong["init_scale"] = f"scale {scale_text(scaler.scale)} is negative"
    if scaler.growth_tracker < 0:
        wrong["growth_tracker"] = f"the count of clean steps {scaler.growth_tracker} is negative"
    return wrong


@RULE.judges(CheckpointSummary)
def _scaler_settings(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for scaler in living(summary):
        yield from _of(summary, scaler)


def _of(summary: CheckpointSummary, scaler: ScalerState) -> Iterator[Finding]:
    wrong = list(wrong_settings(scaler).values())
    if wrong:
        message = f"The loss scaler's settings cannot work: {'; '.join(wrong)}."
        yield scaler_finding(summary, scaler, RULE, "warning", message, {"wrong": wrong})
