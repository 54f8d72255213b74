"""AMP403: the loss scale cannot grow any more, by its own counter or by the log."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scale_history import scale_history
from ampdoctor.diagnosis.scaler.scaler_finding import living, scale_text, scaler_finding
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FROZEN_INTERVALS = Threshold(
    code="AMP403",
    name="intervals",
    default=3,
    unit="growth intervals",
    lowest=1,
    highest=1000,
    why="Growth intervals in a log without a growth or an overflow: a hysteresis that is used up unseen takes one.",
)
RULE = register(
    "AMP403",
    "frozen-scaler",
    "The loss scale cannot grow any more",
    worst="warning",
    commands=SCANNED,
    thresholds=(FROZEN_INTERVALS,),
)

HIGHEST_CAP = 2.0**24
"""Apex's largest scale: one that stays there, or above, may be at a cap."""


def frozen_words(scaler: ScalerState) -> str | None:
    """Why a scale cannot grow any more, as a sentence; None where it can."""
    if not 0 < scaler.growth_interval <= scaler.growth_tracker:
        return None
    return (
        f"The loss scale cannot grow: {scaler.growth_tracker} clean steps are counted and it grows when exactly "
        f"{scaler.growth_interval} are, so not before the next overflow."
    )


@RULE.judges(CheckpointSummary)
def _frozen_scaler(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    for scaler in living(summary):
        message = frozen_words(scaler)
        if message is not None:
            yield scaler_finding(summary, scaler, RULE, "warning", message, {})
    yield from standing_scale(summary, thresholds)


def standing_scale(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """A scale that used to grow and stays where it is, with no overflow to hold it there.

    Only where every step is logged: between two entries it may have grown and lost that again, as in health it does.
    A scaler that is stored tells it by its own counter.
    """
    history = scale_history(summary)
    if summary.scalers or history.scaler is None or not history.starts:
        return
    start, interval = history.starts[-1], history.scaler.growth_interval
    scale, last = start[-1][1], start[-1][0].step
    rest = 1
    while rest < len(start) and start[-rest - 1][1] == scale and start[-rest - 1][0].step == last - rest:
        rest += 1
    first = start[-rest][0].step
    norms = [e.grad_norm for e in summary.log if e.grad_norm is not None and first <= e.step <= last]
    if (
        last - first < thresholds[FROZEN_INTERVALS] * interval
        or scale >= HIGHEST_CAP
        or not all(map(math.isfinite, norms))
    ):
        return
    yield checkpoint_finding(
        summary,
        RULE,
        "note",
        f"The loss scale has stayed at {scale_text(scale)} from step {first} to {last} without an overflow; before, it "
        f"grew after {interval} steps.",
        evidence={"scale": scale, "first_step": first, "last_step": last, "growth_interval": interval},
        phase="scaler",
        op="scaler_state",
        global_step=first,
    )
