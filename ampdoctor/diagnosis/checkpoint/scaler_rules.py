"""Rules on the state of a loss scaler (AMP4xx): pure functions of a checkpoint's summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ampdoctor.diagnosis.checkpoint.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.evidence.of_checkpoints.checkpoint import DEAD_SCALE, CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import COLLAPSED_ERROR, HIGHEST_SETTLED, MOSTLY_FLUSHED
from ampdoctor.evidence.where import NonFinite

FP16_FLUSH_AT = 2.0**-25
"""Scaled gradients up to this magnitude become zero in fp16."""
FP16_SPACING = 2.0**-24
"""Distance between neighbours in fp16's subnormal zone; its rounding error has a standard deviation of this over
sqrt(12)."""
FP16_MAX = 65504.0
"""fp16's largest finite number."""
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})
"""State that is zero where no gradient ever arrived."""
LOGGED_NORMS = 10
"""Latest gradient norms of the log whose median stands for the run's."""
FRESH_SCALER: Mapping[str, float | int] = MappingProxyType(
    {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
)
"""GradScaler's own defaults."""


def scaler_findings(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Everything that is wrong with the loss scalers of a checkpoint."""
    for scaler in summary.scalers:
        dead = _dead(summary, scaler)
        if dead is not None:
            yield dead
            continue
        yield from _collapsed(summary, scaler, thresholds[COLLAPSED_ERROR])
        yield from _frozen(summary, scaler)
        yield from _settings(summary, scaler)
        yield from _at_floor(summary, scaler)
        yield from _boundless(summary, scaler, thresholds[HIGHEST_SETTLED])
    if not summary.scalers:
        yield from _missing(summary, thresholds[MOSTLY_FLUSHED])


def shown_scaler(summary: CheckpointSummary, findings: Sequence[Finding]) -> ScalerState | None:
    """Which of a checkpoint's scalers its report shows: a GAN has one for each of its two models.

    The one that the worst of the findings on scalers speaks of, else the one that is nearest to its death.

    Args:
        summary: The checkpoint.
        findings: What `diagnose` found in it, the worst first.
    """
    of = {(scaler.key, scaler.file or None): scaler for scaler in reversed(summary.scalers)}
    told = (of.get((f.where.tensor or "", f.where.file)) for f in findings if f.where.op == "scaler_state")
    spoken_of = next((scaler for scaler in told if scaler is not None), None)
    return spoken_of or min(summary.scalers, key=lambda s: -math.inf if s.dead else s.scale, default=None)


def scale_text(scale: float) -> str:
    """A loss scale for people: "65536", "2^-18", "0.3"."""
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5 and not 1 <= scale <= 2**24:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:.10g}"


def typical_gradient(summary: CheckpointSummary, scaler: ScalerState) -> tuple[float, int]:
    """Magnitude of a gradient element of average size, and over how many weights the norm was spread.

    The weights are those of the scaler's own file, else all.

    The norm is the median of the last `LOGGED_NORMS` finite positive ones in the log, else 1, where most runs clip.
    """
    norms = [e.grad_norm for e in summary.log if e.grad_norm is not None and 0 < e.grad_norm < math.inf]
    norm = statistics.median(norms[-LOGGED_NORMS:]) if norms else 1.0
    main = [t for t in summary.tensors if t.role == "weight" and not t.group]
    beside = [t for t in main if t.file == scaler.file]
    weights = sum(t.examined for t in beside or main)
    return norm / math.sqrt(max(weights, 1)), weights


def dead_words(scale: float) -> str:
    """What a dead scale does, as the rest of a sentence about it."""
    if math.isfinite(scale):
        return (
            f"{scale_text(scale)}, so 1/scale is infinite: the next step without an overflow writes Inf or NaN into "
            "the weights"
        )
    return f"{scale_text(scale)}: every step is skipped for ever"


def _dead(summary: CheckpointSummary, scaler: ScalerState) -> Finding | None:
    if not scaler.dead:
        return None
    message = f"The loss scale is {dead_words(scaler.scale)}."
    born: NonFinite = "nan" if math.isnan(scaler.scale) else "inf"
    return _finding(
        summary, scaler, "AMP401", "error", message, {"limit": DEAD_SCALE}, cause="bad_checkpoint", born=born
    )


def _collapsed(summary: CheckpointSummary, scaler: ScalerState, harmful: float) -> Iterator[Finding]:
    if not 0 < scaler.scale < 1:
        return
    element, weights = typical_gradient(summary, scaler)
    error = min(FP16_SPACING / math.sqrt(12) / (element * scaler.scale), 1.0)
    flushed_below = FP16_FLUSH_AT / scaler.scale
    message = (
        f"The loss scale has collapsed to {scale_text(scaler.scale)}: gradients up to {flushed_below:.3g} become zero "
        f"in fp16, and one of average size ({element:.2g}) loses {100 * error:.3g} % to rounding; {_growth(scaler)}."
    )
    evidence = {
        "flushed_below": flushed_below,
        "typical_gradient": element,
        "relative_error": error,
        "weights": weights,
    }
    yield _finding(
        summary,
        scaler,
        "AMP402",
        "error" if error >= harmful else "warning",
        message,
        evidence,
        cause="scaler_collapse",
    )


def _growth(scaler: ScalerState) -> str:
    """How far the scale is from growing back to 1."""
    if scaler.growth_factor <= 1 or scaler.growth_interval <= 0:
        return "with its settings it never grows back"
    doublings = math.ceil(-math.log(scaler.scale) / math.log(scaler.growth_factor))
    steps = doublings * scaler.growth_interval - scaler.growth_tracker
    return f"it would take {max(steps, 0)} steps without an overflow to grow back to 1"


def frozen_words(scaler: ScalerState) -> str | None:
    """Why a scale cannot grow any more, as a sentence; None where it can."""
    if not 0 < scaler.growth_interval <= scaler.growth_tracker:
        return None
    return (
        f"The loss scale cannot grow: {scaler.growth_tracker} clean steps are counted and it grows when exactly "
        f"{scaler.growth_interval} are, so not before the next overflow."
    )


def _frozen(summary: CheckpointSummary, scaler: ScalerState) -> Iterator[Finding]:
    message = frozen_words(scaler)
    if message is not None:
        yield _finding(summary, scaler, "AMP403", "warning", message, {})


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


def _settings(summary: CheckpointSummary, scaler: ScalerState) -> Iterator[Finding]:
    wrong = list(wrong_settings(scaler).values())
    if wrong:
        message = f"The loss scaler's settings cannot work: {'; '.join(wrong)}."
        yield _finding(summary, scaler, "AMP404", "warning", message, {"wrong": wrong})


def is_static(scaler: ScalerState) -> bool:
    """Whether both factors are 1: a fixed scale, which neither grows nor backs off."""
    return scaler.growth_factor == scaler.backoff_factor == 1


def _at_floor(summary: CheckpointSummary, scaler: ScalerState) -> Iterator[Finding]:
    floor = scaler.min_scale
    if floor is None or not 0 < scaler.scale <= floor or is_static(scaler):
        return
    just = scaler.growth_tracker <= 0
    message = (
        f"The loss scale {scale_text(scaler.scale)} is at its floor of {scale_text(floor)}"
        f"{', where an overflow has just put it' if just else f'; {scaler.growth_tracker} steps went well since'}: "
        "at the next one it cannot give way."
    )
    yield _finding(summary, scaler, "AMP408", "warning" if just else "note", message, {"min_scale": floor})


def _boundless(summary: CheckpointSummary, scaler: ScalerState, highest: float) -> Iterator[Finding]:
    if scaler.scale < highest or is_static(scaler):
        return
    largest = FP16_MAX / scaler.scale
    message = (
        f"The loss scale is {scale_text(scaler.scale)} and no step overflows: either every gradient in fp16 is "
        f"below {largest:.2g}, or none is computed in fp16, and the scaler has nothing to do."
    )
    yield _finding(summary, scaler, "AMP409", "note", message, {"largest_gradient": largest})


def _missing(summary: CheckpointSummary, mostly: float) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group and len(t.shape) >= 2 and t.examined]
    moments = [t for t in summary.tensors if t.role == "moment" and t.entry in FIRST_MOMENTS and len(t.shape) >= 2]
    if not weights or not moments or any(t.dtype != "float16" for t in weights):
        return
    if any(entry.scale is not None for entry in summary.log):
        return
    halves = all(t.dtype == "float16" for t in moments)
    zeros = statistics.median(t.zeros / max(t.counted, 1) for t in moments)
    flushed = halves and zeros >= mostly
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
        "AMP410",
        "warning" if flushed else "note",
        message,
        evidence={"weights": len(weights), "moments_dtype": moments[0].dtype, "zero_first_moments": zeros},
        op="scaler_state",
        file=weights[0].file,
        cause="grad_underflow" if flushed else None,
    )


def _finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    summary: CheckpointSummary,
    scaler: ScalerState,
    code: str,
    severity: Severity,
    message: str,
    evidence: Mapping[str, Any],
    *,
    cause: str | None = None,
    born: NonFinite = "none",
) -> Finding:
    return checkpoint_finding(
        summary,
        code,
        severity,
        message,
        evidence={**scaler_numbers(scaler), **evidence},
        op="scaler_state",
        born=born,
        tensor=scaler.key,
        file=scaler.file,
        cause=cause,
        prescription=fresh_scaler() if code in {"AMP401", "AMP402"} else None,
    )


def fresh_scaler(detail: str = "Resume with a fresh scaler instead of the stored state.") -> Prescription:
    """The change to a GradScaler with its own defaults."""
    return Prescription(kind="scaler", value=dict(FRESH_SCALER), status="not_run", reason=NOT_REPLAYED, detail=detail)


def scaler_numbers(scaler: ScalerState) -> dict[str, Any]:
    """A scaler's state as JSON values."""
    return {
        "scale": scaler.scale,
        "growth_factor": scaler.growth_factor,
        "backoff_factor": scaler.backoff_factor,
        "growth_interval": scaler.growth_interval,
        "growth_tracker": scaler.growth_tracker,
    }
