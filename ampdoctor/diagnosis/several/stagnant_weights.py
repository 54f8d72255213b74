"""AMP712: 16-bit weights stand still because updates are rounded away."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.several.change_finding import change_finding, elements_of, row_of, weights_of
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED, percent
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, TensorChange
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

STILL = Threshold(
    code="AMP712",
    name="stalled",
    default=0.75,
    unit="share",
    why="Share of a weight's elements that stay exactly the same, and share of the movement that is lost: AMP501's, "
    "where it was measured on single updates.",
)
WOULD_MOVE = Threshold(
    code="AMP712",
    name="would_move",
    default=0.5,
    unit="share",
    why="Share of a weight's elements that exact sums of the updates would change: half, so that standing still is no "
    "matter of a small learning rate.",
)
MOST = Threshold(
    code="AMP712",
    name="most",
    default=0.5,
    unit="share",
    why="Share of all trained elements from which it is an error: most of the model.",
)
RULE = register(
    "AMP712",
    "stagnant-weights",
    "16-bit weights stand still because updates are rounded away",
    worst="error",
    commands=SCANNED,
    thresholds=(STILL, WOULD_MOVE, MOST),
)

_HALF = frozenset({"float16", "bfloat16"})


def stagnates(tensor: TensorChange, thresholds: Thresholds) -> bool:
    """Whether a weight's updates are lost to rounding in its 16-bit format."""
    reach, still = tensor.reach, thresholds[STILL]
    return (
        tensor.pure_half
        and reach is not None
        and tensor.unchanged >= still * tensor.elements
        and reach.adds_up >= thresholds[WOULD_MOVE]
        and reach.lands <= (1 - still) * reach.adds_up
    )


@RULE.judges(CheckpointChange)
def _stagnant_weights(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    if not change.steps or change.steps < 0:
        return
    trained = [t for t in weights_of(change) if t.pure_half and t.moments]
    still = [t for t in trained if stagnates(t, thresholds)]
    if not still:
        return
    share = elements_of(still) / elements_of(trained)
    matrices = [t for t in still if len(t.shape) >= 2]
    severity: Severity = "error" if share >= thresholds[MOST] and matrices else "warning" if matrices else "note"
    worst = max(matrices or still, key=lambda t: (t.elements, t.address))
    reach = worst.reach
    assert reach is not None  # noqa: S101 - stagnates() holds
    message = (
        f"{len(still)} of {len(trained)} trained {worst.dtype} weights stand still: in {worst.address} "
        f"{percent(worst.unchanged / worst.elements)} of the values did not change in {change.steps} steps, because "
        f"an update of {reach.rms:.2g} is less than half the distance to the next {worst.dtype} number for "
        f"{percent(1 - reach.lands)} of them."
    )
    evidence = {
        "steps": change.steps,
        "share_of_trained_elements": share,
        "learning_rate": reach.learning_rate,
        "tensors": len(still),
        "listed": [row_of(t) for t in sorted(still, key=lambda t: -t.elements)[:MAX_LISTED]],
    }
    yield change_finding(RULE, severity, worst, message, evidence, change, still, cause="optimizer_precision")


@RULE.judges(CheckpointChange)
def _perhaps_stagnant(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    """Files without optimizer state: what stands still may be frozen, or copied from fp32 weights that move."""
    matrices = [t for t in weights_of(change) if t.dtype in _HALF and t.old_dtype == t.dtype and len(t.shape) >= 2]
    partly = [t for t in matrices if thresholds[STILL] * t.elements <= t.unchanged < t.elements]
    if any(t.moments for t in change.tensors) or not partly:
        return
    if elements_of(partly) < thresholds[MOST] * elements_of(matrices):
        return
    if not change.steps or change.steps < 0:
        return
    worst = max(partly, key=lambda t: (t.unchanged / t.elements, t.address))
    message = (
        f"In {len(partly)} of {len(matrices)} {worst.dtype} matrices most values did not change in {change.steps} "
        f"steps ({percent(worst.unchanged / worst.elements)} in {worst.address}): either the updates are lost to "
        f"rounding, or these are copies of fp32 weights that moved little. Without optimizer state this cannot be told."
    )
    evidence = {"steps": change.steps, "tensors": len(partly), "listed": [row_of(t) for t in partly[:MAX_LISTED]]}
    yield change_finding(RULE, "note", worst, message, evidence, change, partly)
