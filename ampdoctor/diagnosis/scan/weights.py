"""Rules on a checkpoint's weights: what a cast would lose, what a cast has clamped, what did not move."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue import SCANNED, rule, short
from ampdoctor.diagnosis.scan.tensors import (
    FP16_MAX,
    MAX_LISTED,
    WARNING,
    address,
    also_of,
    cast_row,
    castable,
    count_of,
    each_tensor,
    is_mask,
    label,
    listed,
    percent,
    where_of,
)
from ampdoctor.evidence.checkpoint_stats import CastLoss, CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

LOSSY_CAST_RULE = rule("AMP105", SCANNED)
LOSSY_CAST = LOSSY_CAST_RULE["relative_error"]

_HALF = ("fp16", "bf16")  # casts without a scale (AMP105); fp8 always has one


@LOSSY_CAST_RULE.judges(CheckpointSummary)
def _lossy_cast(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    most = thresholds[LOSSY_CAST]
    for tensors in castable(summary):
        lossy = [(t, loss) for t in tensors for loss in t.casts if loss.format in _HALF and _loses(loss, most)]
        if not lossy:
            continue
        worst, loss = max(lossy, key=lambda pair: pair[1].relative_error)
        names = sorted({found.format for _, found in lossy}, reverse=True)
        by_format = {name: [cast_row(t, name) for t, found in lossy if found.format == name] for name in names}
        cast = list({id(t): t for t, _ in lossy}.values())
        erased = any(len(t.shape) >= 2 and found.flushed >= thresholds[LOSSY_CAST_RULE["erased"]] for t, found in lossy)
        bound = "bf16's own rounding" if most == LOSSY_CAST.default else f"a relative error of {most:.3g}"
        yield LOSSY_CAST_RULE.finding(
            "warning" if erased else "note",
            f"A cast to {' or '.join(names)} would change {count_of(cast, verb='')} by more than {bound}, most of all "
            f"{label(worst)}. In {loss.format} {percent(loss.flushed)} of its nonzero values become zero and "
            f"{percent(loss.subnormal)} subnormal; the relative error is {loss.relative_error:.2g}{_sampled(worst)}.",
            where=where_of(worst, summary.global_step),
            also=also_of(worst, cast),
            evidence={
                "role": worst.role,
                "tensors": len(cast),
                **{name: rows[:MAX_LISTED] for name, rows in by_format.items()},
            },
        )


def _sampled(tensor: TensorSummary) -> str:
    if tensor.counted >= tensor.examined:
        return ""
    return (
        f" (from a sample of 1 in {round(tensor.examined / max(tensor.counted, 1))}; --threshold exact=true counts all)"
    )


def _loses(loss: CastLoss, most: float) -> bool:
    """Overflow in fp16 has an infinite error, which would hide all others; it is AMP104's."""
    return loss.relative_error > most and not (loss.format == "fp16" and loss.overflowed)


SATURATED_VALUES = rule("AMP107", SCANNED)
SATURATED_8_BIT = SATURATED_VALUES["saturated"]


@SATURATED_VALUES.judges(CheckpointSummary)
def _saturated_values(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    share = thresholds[SATURATED_8_BIT]
    clamped = [
        t
        for t in summary.tensors
        if t.role in {"weight", "buffer", "ema", "moment"} and t.at_max and not is_mask(t) and _too_many(t, share)
    ]
    yield from each_tensor(
        summary,
        SATURATED_VALUES,
        clamped,
        lambda t: (
            f"{t.at_max:,} of {t.examined:,} values of {label(t)} are exactly {t.amax:,.6g}, the largest value of "
            f"{short(t.dtype)}: they were clamped."
        ),
        "were clamped to the largest value of their dtype",
        severity=WARNING,
        more=lambda t: {"at_max": t.at_max},
    )
    yield from each_tensor(
        summary,
        SATURATED_VALUES,
        [t for t in summary.tensors if _clamped_before(t)],
        lambda t: (
            f"The largest value of {label(t)} in {short(t.dtype)} is exactly 65,504, fp16's largest: it was clamped to "
            "fp16 and stored wider."
        ),
        "were clamped to fp16 and stored wider",
        severity=WARNING,
    )


def _clamped_before(tensor: TensorSummary) -> bool:
    """Whether a weight's largest magnitude is fp16's maximum, in a format where that is no limit."""
    return (
        tensor.role in {"weight", "ema"}
        and tensor.dtype in {"float32", "float64"}
        and tensor.amax == FP16_MAX
        and tensor.examined > 1
        and tensor.constant is None
        and not is_mask(tensor)
    )


def _too_many(tensor: TensorSummary, share: float) -> bool:
    """Whether the share of a float8 tensor is too large; in a wider format one element is."""
    return not tensor.dtype.startswith("float8") or tensor.at_max > share * tensor.examined


UNMOVED_WEIGHT = rule("AMP111", SCANNED)

_SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance of 1 to the next number."""
_FLUSHED = {"float64": 2.0**-1075, "float32": 2.0**-150, "bfloat16": 2.0**-134, "float16": 2.0**-25}
"""Magnitude up to which a number becomes zero."""


@UNMOVED_WEIGHT.judges(CheckpointSummary)
def _unmoved_weight(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    rate, epsilon = _settings(summary, thresholds[UNMOVED_WEIGHT["steps"]])
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
    are, their = ("1 weight is", "its") if len(stuck) == 1 else (f"{len(stuck)} weights are", "their")
    message = (
        f"{are} exactly constant, and {their} moments show that gradients arrive. "
        f"All {worst.examined:,} values of {address(worst)} are {value:.6g}, and its next update reaches {update:.2g}."
    )
    evidence = {"value": value, "update": update, "tensors": len(stuck), "listed": listed([t for t, _ in stuck])}
    yield UNMOVED_WEIGHT.finding(
        "warning",
        message,
        where=where_of(worst, summary.global_step),
        also=tuple(where_of(weight) for weight, _ in stuck[1:]),
        cause="bad_checkpoint",
        evidence=evidence,
    )


def _initial(weight: TensorSummary) -> float | None:
    """Returns 0 or 1 where all elements are exactly that, as in no weight that moved (1 not in half)."""
    if weight.blank:
        return 0.0
    return 1.0 if weight.constant == 1 and weight.dtype in {"float32", "float64"} else None


def _settings(summary: CheckpointSummary, sure: float) -> tuple[float | None, float | None]:
    """Returns the smallest learning rate and the largest epsilon; None if unknown or 0, or early in the run."""
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
    """Returns the largest update that may leave a number unchanged."""
    return max(abs(value) * _SPACING.get(dtype, math.inf), _FLUSHED.get(dtype, math.inf))
