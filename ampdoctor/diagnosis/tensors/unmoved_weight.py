"""AMP111: a weight stands still although gradients arrive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.tensor_finding import address, listed, state_place
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

SURE_STEPS = Threshold(
    code="AMP111",
    name="steps",
    default=10,
    unit="steps",
    lowest=1,
    highest=1_000_000,
    why="Steps after which the first learning rate of a warm-up, 0, is long past.",
)
RULE = register(
    "AMP111",
    "unmoved-weight",
    "A weight stands still although gradients arrive",
    worst="warning",
    commands=SCANNED,
    thresholds=(SURE_STEPS,),
)

_SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance of 1 to the next number."""
_FLUSHED = {"float64": 2.0**-1075, "float32": 2.0**-150, "bfloat16": 2.0**-134, "float16": 2.0**-25}
"""Magnitude up to which a number becomes zero."""


@RULE.judges(CheckpointSummary)
def _unmoved_weight(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    rate, epsilon = _settings(summary, thresholds[SURE_STEPS])
    if rate is None or epsilon is None:
        return
    moments = {(t.name, t.entry): t for t in summary.tensors if t.role == "moment"}
    stuck: list[tuple[TensorSummary, float]] = []
    for weight in summary.tensors:
        value = _initial(weight)
        if weight.role != "weight" or weight.group or weight.examined < 2 or value is None:
            continue
        first, second = moments.get((weight.name, "exp_avg")), moments.get((weight.name, "exp_avg_sq"))
        if first is None or second is None or first.amax is None or second.amax is None:
            continue
        root = math.sqrt(second.amax)
        update = rate * first.amax / (root + epsilon)
        if root >= epsilon and update > _invisible(value, weight.dtype):
            stuck.append((weight, update))
    if not stuck:
        return
    worst, update = stuck[0]
    value = _initial(worst)
    message = (
        f"{_count(stuck)} exactly constant although {'its' if len(stuck) == 1 else 'their'} moments say that gradients "
        f"arrive: all {worst.examined} values of {address(worst)} are {value:.6g}, and its next update reaches "
        f"{update:.2g}."
    )
    evidence = {"value": value, "update": update, "tensors": len(stuck), "listed": listed([t for t, _ in stuck])}
    yield checkpoint_finding(
        summary,
        RULE,
        "warning",
        message,
        evidence=evidence,
        module=worst.module,
        op=f"state:{worst.entry}",
        tensor=address(worst),
        file=worst.file,
        also=(state_place(weight) for weight, _ in stuck[1:]),
        cause="bad_checkpoint",
    )


def _initial(weight: TensorSummary) -> float | None:
    """0 or 1 where all elements are exactly that, which no moved weight is.

    Another shared value says nothing: Adam moves elements in step whose gradients have one sign. Nor does 1 in half,
    where a step there and back lands on it again.
    """
    if weight.blank:
        return 0.0
    return 1.0 if weight.constant == 1 and weight.dtype in {"float32", "float64"} else None


def _settings(summary: CheckpointSummary, sure: float) -> tuple[float | None, float | None]:
    """The smallest learning rate and the largest epsilon; None where one is unknown or 0, or the run has just begun."""
    groups = [group for optimizer in summary.optimizers for group in optimizer.groups]
    rates = [group.learning_rate for group in groups]
    epsilons = [group.epsilon for group in groups if group.epsilon is not None]
    steps = [step for optimizer in summary.optimizers for step, _ in optimizer.steps]
    if not steps or min(steps) < sure or not epsilons:
        return None, None
    if any(rate is None or not 0 < rate < math.inf for rate in rates):
        return None, None
    return min(rate for rate in rates if rate is not None), max(epsilons)


def _invisible(value: float, dtype: str) -> float:
    """The largest update that may leave a number as it is."""
    return max(abs(value) * _SPACING.get(dtype, math.inf), _FLUSHED.get(dtype, math.inf))


def _count(stuck: Sequence[object]) -> str:
    return "1 weight is" if len(stuck) == 1 else f"{len(stuck)} weights are"
