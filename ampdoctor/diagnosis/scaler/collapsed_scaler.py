"""AMP402: the loss scale has fallen below 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import LOGGED_NORMS, living, scale_text, scaler_finding, without_a_scale
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_FLUSH_AT
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogEntry, ScalerState
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

COLLAPSED_ERROR = Threshold(
    code="AMP402",
    name="relative_error",
    default=2e-2,
    unit="relative error",
    why="Rounding error of a typical gradient from which a scale below 1 is an error: from there on training was "
    "measurably worse (as AMP301.error_warning).",
)
FALLING = Threshold(
    code="AMP402",
    name="falls",
    default=4,
    unit="back-offs",
    lowest=1,
    highest=1000,
    why="Back-offs below 1 from which a scale that is falling still is an error: at 1 nothing is scaled, and gradients "
    "that overflow at a sixteenth of themselves exceed a million (as AMP723.in_a_row).",
)
RULE = register(
    "AMP402",
    "collapsed-scaler",
    "The loss scale has fallen below 1",
    worst="error",
    commands=SCANNED,
    thresholds=(COLLAPSED_ERROR, FALLING),
    ruins_checkpoint=True,
)

JUST_FALLEN = 10
"""Clean steps since the last change up to which a scale is falling: where nearly every step overflows, there are fewer
between two back-offs; a scale at rest has gone any number of steps up to the growth interval, and so seldom as few."""
_SELDOM = 20
"""Of a growth interval those steps are at most one in so many."""
FP16_SPACING = 2.0**-24
"""Distance between neighbours in fp16's subnormal zone; its rounding error has a standard deviation of this over
sqrt(12)."""


def typical_gradient(log: Iterable[LogEntry], weights: int) -> float:
    """Magnitude of a gradient element of average size: the gradient's norm spread evenly over the weights.

    Args:
        log: The training's log. The norm is the median of its last `LOGGED_NORMS` finite positive ones, else 1, where
            most runs clip.
        weights: Number of elements that have a gradient.
    """
    norms = [e.grad_norm for e in log if e.grad_norm is not None and 0 < e.grad_norm < math.inf]
    norm = statistics.median(norms[-LOGGED_NORMS:]) if norms else 1.0
    return norm / math.sqrt(max(weights, 1))


def collapse_severity(scaler: ScalerState, element: float, step: int | None, thresholds: Thresholds) -> Severity:
    """How bad a scale below 1 is: an error where it is falling still, or where what it costs has harmed trainings.

    Args:
        scaler: The saved scaler; its scale is above 0 and below 1.
        element: From `typical_gradient`.
        step: Number of the steps that the training has made; None where nothing says it.
        thresholds: What harms, and from which fall on (AMP402).
    """
    harmful = _error_of(scaler, element) >= thresholds[COLLAPSED_ERROR]
    return "error" if harmful or _is_falling(scaler, step, thresholds) else "warning"


def _error_of(scaler: ScalerState, element: float) -> float:
    """The relative error with which fp16 rounds an element at the scaler's scale."""
    return min(FP16_SPACING / math.sqrt(12) / (element * scaler.scale), 1.0)


def _weights(summary: CheckpointSummary, scaler: ScalerState) -> int:
    """Number of the weights' elements: of those in the scaler's own file, else of all."""
    main = [t for t in summary.tensors if t.role == "weight" and not t.group]
    return sum(t.examined for t in [t for t in main if t.file == scaler.file] or main)


@RULE.judges(CheckpointSummary)
def _collapsed_scaler(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    for scaler in living(summary):
        if 0 < scaler.scale < 1:
            yield _of(summary, scaler, thresholds)


def _of(summary: CheckpointSummary, scaler: ScalerState, thresholds: Thresholds) -> Finding:
    weights = _weights(summary, scaler)
    element = typical_gradient(summary.log, weights)
    error = _error_of(scaler, element)
    flushed_below = FP16_FLUSH_AT / scaler.scale
    falling = _is_falling(scaler, summary.global_step, thresholds)
    message = (
        f"The loss scale has collapsed to {scale_text(scaler.scale)}: gradients up to {flushed_below:.3g} become zero "
        f"in fp16, and one of average size ({element:.2g}) loses {100 * error:.3g} % to rounding; {_growth(scaler)}"
        f"{f', and gradients overflowed {_ago(scaler)}' if falling else ''}."
    )
    evidence = {
        "flushed_below": flushed_below,
        "typical_gradient": element,
        "relative_error": error,
        "weights": weights,
    }
    return scaler_finding(
        summary,
        scaler,
        RULE,
        collapse_severity(scaler, element, summary.global_step, thresholds),
        message,
        evidence,
        cause="scaler_collapse",
        prescription=without_a_scale(),
    )


def _falls_below_one(scaler: ScalerState) -> float:
    """How many back-offs have brought a scale from 1 to where it is."""
    if not 0 < scaler.backoff_factor < 1:
        return 0.0
    return math.log(scaler.scale) / math.log(scaler.backoff_factor)


def _is_falling(scaler: ScalerState, step: int | None, thresholds: Thresholds) -> bool:
    """Whether the scale has just fallen, and not been given its value by the user, nor grown with the last step."""
    interval = scaler.growth_interval
    if _falls_below_one(scaler) < thresholds[FALLING]:
        return False
    if step == 0 or (step is not None and interval > 0 and scaler.growth_tracker == step % interval):
        return False
    return scaler.growth_tracker <= (min(JUST_FALLEN, interval // _SELDOM) if interval > 0 else JUST_FALLEN)


def _ago(scaler: ScalerState) -> str:
    count = max(scaler.growth_tracker, 0)
    return "one step ago" if count == 1 else f"{count} steps ago" if count else "in the last step"


def _growth(scaler: ScalerState) -> str:
    """How far the scale is from growing back to 1."""
    if not 1 < scaler.growth_factor < math.inf or scaler.growth_interval <= 0:
        return "with its settings it never grows back"
    doublings = math.ceil(-math.log(scaler.scale) / math.log(scaler.growth_factor))
    steps = doublings * scaler.growth_interval - scaler.growth_tracker
    return f"it would take {max(steps, 0)} steps without an overflow to grow back to 1"
