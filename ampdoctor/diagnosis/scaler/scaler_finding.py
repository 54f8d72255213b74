"""A finding about a loss scaler's state: what these rules share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ampdoctor.diagnosis.catalogue.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState
from ampdoctor.evidence.location import NonFinite
from ampdoctor.evidence.report import Finding, Prescription, Severity

FRESH_SCALER: Mapping[str, float | int] = MappingProxyType(
    {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
)
"""GradScaler's own defaults."""
LOGGED_NORMS = 10
"""Latest gradient norms of the log whose median stands for the run's."""


def scale_text(scale: float) -> str:
    """A loss scale for people: "65536", "2^-18", "0.3"."""
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5 and not 1 <= scale <= 2**24:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:.10g}"


def starting_scale(what: str, own: float | None) -> str:
    """Where a run starts: "the run starts at 65536", or "the run has no scaler"."""
    return f"{what} starts at {scale_text(own)}" if own is not None else f"{what} has no scaler"


def living(summary: CheckpointSummary) -> Iterator[ScalerState]:
    """The scalers that are not dead: of a dead one, nothing else is worth a word."""
    return (scaler for scaler in summary.scalers if not scaler.dead)


def is_static(scaler: ScalerState) -> bool:
    """Whether both factors are 1: a fixed scale, which neither grows nor backs off."""
    return scaler.growth_factor == scaler.backoff_factor == 1


def scaler_finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    summary: CheckpointSummary,
    scaler: ScalerState,
    rule: Rule,
    severity: Severity,
    message: str,
    evidence: Mapping[str, Any],
    *,
    cause: str | None = None,
    born: NonFinite = "none",
    prescription: Prescription | None = None,
) -> Finding:
    """A finding about one of a checkpoint's scalers."""
    return checkpoint_finding(
        summary,
        rule,
        severity,
        message,
        evidence={**scaler_numbers(scaler), **evidence},
        op="scaler_state",
        born=born,
        tensor=scaler.key,
        file=scaler.file,
        cause=cause,
        prescription=prescription,
    )


def fresh_scaler(detail: str = "Resume with a fresh scaler instead of the stored state.") -> Prescription:
    """The change to a GradScaler with its own defaults."""
    return Prescription(kind="scaler", value=dict(FRESH_SCALER), status="not_run", reason=NOT_REPLAYED, detail=detail)


def without_a_scale() -> Prescription:
    """The change where a scale has fallen below 1: what overflows at a scale of 1 does so under a fresh one as well.

    A file does not show whether values overflow or batches were bad, which no format cures.
    """
    alone = "If you must stay in fp16: a fresh scaler, once what overflows at a scale of 1 is mended."
    return Prescription(
        kind="dtype",
        value="bfloat16",
        status="not_run",
        reason=NOT_REPLAYED,
        detail="train in bf16, without a GradScaler; if bad batches made the scale fall, leave those out instead "
        "(ampdoctor bisect-nan shows which)",
        alternatives=(fresh_scaler(alone),),
    )


def scaler_numbers(scaler: ScalerState) -> dict[str, Any]:
    """A scaler's state as JSON values."""
    return {
        "scale": scaler.scale,
        "growth_factor": scaler.growth_factor,
        "backoff_factor": scaler.backoff_factor,
        "growth_interval": scaler.growth_interval,
        "growth_tracker": scaler.growth_tracker,
    }


def shown_scaler(summary: CheckpointSummary, findings: Sequence[Finding]) -> ScalerState | None:
    """Which of a checkpoint's scalers its report shows: a GAN has one for each of its two models.

    The one that the worst of the findings on scalers speaks of, else the one that is nearest to its death.

    Args:
        summary: The checkpoint.
        findings: What the rules found in it, the worst first.
    """
    of = {(scaler.key, scaler.file or None): scaler for scaler in reversed(summary.scalers)}
    told = (of.get((f.where.tensor or "", f.where.file)) for f in findings if f.where.op == "scaler_state")
    spoken_of = next((scaler for scaler in told if scaler is not None), None)
    return spoken_of or min(summary.scalers, key=lambda s: -math.inf if s.dead else s.scale, default=None)
