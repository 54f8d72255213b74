"""AMP402: the loss scale has fallen below 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.scaler.scaler_finding import LOGGED_NORMS, living, scale_text, scaler_finding, without_a_scale
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_FLUSH_AT
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary, ScalerState
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.thresholds.threshold import Threshold

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


@RULE.judges(CheckpointSummary)
def _collapsed_scaler(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    for scaler in living(summary):
        yield from _of(summary, scaler, thresholds[COLLAPSED_ERROR], thresholds[FALLING])


def _of(summary: CheckpointSummary, scaler: ScalerState, harmful: float, falls: float) -> Iterator[Finding]:
    if not 0 < scaler.scale < 1:
        return
    element, weights = typical_gradient(summary, scaler)
    error = min(FP16_SPACING / math.sqrt(12) / (element * scaler.scale), 1.0)
    flushed_below = FP16_FLUSH_AT / scaler.scale
    falling = _falls_below_one(scaler) >= falls and _is_falling(summary, scaler)
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
    yield scaler_finding(
        summary,
        scaler,
        RULE,
        "error" if error >= harmful or falling else "warning",
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


def _is_falling(summary: CheckpointSummary, scaler: ScalerState) -> bool:
    """Whether the scale has just fallen, and not been given its value by the user, nor grown with the last step."""
    step, interval = summary.global_step, scaler.growth_interval
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
