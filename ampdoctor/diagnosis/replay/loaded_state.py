"""State that is wrong before the first step of a replay: values, and the optimizer's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.nonfinite import CODES, HELP, STATE_CODES, birth_numbers, sentence_of
from ampdoctor.diagnosis.scan.optimizer import (
    LONGER_UPDATE,
    STEP_LIMITS,
    length_at,
    severity_of_standing,
    standing_words,
)
from ampdoctor.diagnosis.scan.optimizer import SECOND_MOMENT_FLUSHED as FLUSHED
from ampdoctor.diagnosis.scan.optimizer import STEP_COUNTERS as COUNTERS
from ampdoctor.diagnosis.scan.tensors import FP16_OVERFLOW_AT, MAX_LISTED
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Cause, Finding, Prescription
from ampdoctor.evidence.run_facts import FlushedMoment, HalfCounter
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.trace import NonFiniteOrigin, TensorStats

_BESIDE = "beside:"
_THROUGH_HALF = (
    "Copy it from the model, and validate a copy (copy.deepcopy(average).half()) or under autocast, which casts no "
    "weight in place."
)
_LOST = "Look at the code that writes to it, and copy it from the model: an average of Inf or NaN never recovers."
_SHOWN = 3


def state_finding(kind: str, where: Where, stats: TensorStats) -> Finding:
    """Makes the finding for a "param", "buffer" or "optimizer_state" that is non-finite before the first step."""
    count = stats.nans + stats.infs
    return rules()[STATE_CODES[kind]].finding(
        "error",
        f"{where.tensor} ({where.op}) holds {count} non-finite values before the first step",
        where=where,
        cause="bad_checkpoint",
        evidence={
            "nans": stats.nans,
            "infs": stats.infs,
            "dtype": stats.dtype,
            "shape": list(stats.shape),
            "finite_amax": stats.amax,
        },
        advice=HELP["bad_checkpoint"],
        prescription=Prescription(
            kind="code",
            value=f"replace {where.tensor}",
            status="not_run",
            reason="only an earlier checkpoint has the lost values",
            detail="Resume from a checkpoint in which this tensor is finite.",
        ),
    )


def hand_update_finding(where: Where, number: float | None) -> Finding:
    """Makes the finding for a parameter that an update by the loop's own code has made non-finite.

    The op of `where` made the first such value, from finite tensors; `number` is one of its arguments, not finite.
    """
    why = "from finite tensors" if number is None else f"a number among its arguments is {number}"
    cause: Cause = "optimizer_precision" if number is None else "invalid_op"
    return rules()[CODES[cause]].finding(
        "error",
        f"step {where.step}, optimizer: {where.tensor} is not finite after the loop's own update, where {where.op} "
        f"makes it so ({why})",
        where=where,
        cause=cause,
        evidence={"number": number},
        advice=HELP[cause],
    )


def impossible_finding(where: Where, stats: TensorStats, negatives: int, lowest: float) -> Finding:
    """Makes the finding for a mean of squares that has negative elements."""
    message = f"{where.tensor} ({where.op}) cannot be negative, and {negatives} values are, down to {lowest:.4g}"
    return _state_finding("AMP106", where, message, {"negatives": negatives, "lowest": lowest, **_size(stats)})


def saturated_finding(where: Where, stats: TensorStats, at_max: int) -> Finding:
    """Makes the finding for a weight that a conversion clamped to fp16's largest number."""
    message = f"{where.tensor} ({where.op}) holds {at_max} values of exactly 65504, fp16's largest: they were clamped"
    return _state_finding("AMP107", where, message, {"at_max": at_max, **_size(stats)})


def _state_finding(code: str, where: Where, message: str, evidence: Mapping[str, Any]) -> Finding:
    return rules()[code].finding(
        "error", message, where=where, cause="bad_checkpoint", evidence=evidence, advice=HELP["bad_checkpoint"]
    )


def _size(stats: TensorStats) -> dict[str, Any]:
    return {"dtype": stats.dtype, "shape": list(stats.shape), "finite_amax": stats.amax}


def harms_beside_alone(birth: NonFiniteOrigin) -> bool:
    """Returns whether no part of the model is harmed, and the op is a cast to half or code after the backward."""
    if not birth.harms or not all(harm.startswith(_BESIDE) for harm in birth.harms):
        return False
    return _casts_to_half(birth) or birth.after_backward


def beside_finding(birth: NonFiniteOrigin) -> Finding:
    """Makes the finding for an origin of `harms_beside_alone`."""
    names = [harm.removeprefix(_BESIDE) for harm in birth.harms]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    cast = _casts_to_half(birth)
    deed = ", which was cast to fp16 and back" if cast else ""
    message = f"{sentence_of(birth, 'forward_overflow')}; it stays in {shown}, beside the model{deed}"
    where = Where(
        step=birth.where.step,
        phase=birth.where.phase,
        module=birth.where.module,
        op=birth.where.op,
        nonfinite=birth.where.nonfinite,
        source=birth.where.source,
        tensor=names[0],
    )
    return _beside_finding(where, message, {**birth_numbers(birth, ())}, cast=cast)


def seen_beside(name: str, stats: TensorStats, since: int, step: int, twin: tuple[str, float] | None) -> Finding:
    """Makes the finding for a tensor beside the model that was finite after step `since` and not after `step`.

    `twin` is the model's tensor of its name, with its largest magnitude, where that is finite.
    """
    cast = twin is not None and not stats.nans and twin[1] >= FP16_OVERFLOW_AT
    message = (
        f"{name}, beside the model, was finite after step {since} and holds {stats.nans + stats.infs} non-finite "
        f"values after step {step}"
    )
    if cast and twin is not None:
        message += (
            f", and {twin[0]} of the model is finite and reaches {twin[1]:.6g}, beyond fp16's largest number, 65504: "
            "the copy was cast to fp16 and back"
        )
    where = Where(
        step=step,
        phase="optimizer",
        module=name.rpartition(".")[0],
        tensor=name,
        nonfinite="nan" if stats.nans else "inf",
    )
    evidence = {
        "nans": stats.nans,
        "infs": stats.infs,
        "dtype": stats.dtype,
        "shape": list(stats.shape),
        "finite_after": since,
        "nonfinite_after": step,
    }
    return _beside_finding(where, message, evidence, cast=cast)


def _beside_finding(where: Where, message: str, evidence: dict[str, object], *, cast: bool) -> Finding:
    return rules()["AMP114" if cast else "AMP101"].finding(
        "error",
        message,
        where=where,
        evidence=evidence,
        advice=_THROUGH_HALF if cast else _LOST,
        prescription=Prescription(
            kind="code",
            value="cast a copy, not the average itself" if cast else f"mend what writes to {where.tensor}",
            status="not_run",
            reason="the change is in the run's own code",
            detail=_THROUGH_HALF if cast else _LOST,
        ),
    )


def _casts_to_half(birth: NonFiniteOrigin) -> bool:
    return birth.kernel in ("aten._to_copy", "aten.copy_") and any(stats.dtype == "float16" for stats in birth.outputs)


# -- impossible optimizer state, as the first replayed step shows it (AMP502, AMP504) --


def flushed_finding(found: Sequence[FlushedMoment], thresholds: Thresholds) -> Finding | None:
    """Makes the finding for second moments of zero that make the first step too long, if they do."""
    sick = [moment for moment in found if _times(moment) >= thresholds[LONGER_UPDATE]]
    if not sick:
        return None
    worst = max(sick, key=_times)
    starved, elements = sum(m.starved for m in sick), sum(m.elements for m in sick)
    times = "infinitely" if math.isinf(_times(worst)) else f"{_times(worst):.3g} times"
    where = Where(
        step=0,
        phase="checkpoint",
        module=sick[0].module,
        op=f"optimizer_state:{sick[0].entry}",
        tensor=sick[0].name,
    )
    return FLUSHED.finding(
        "error",
        f"{starved} of {elements} second moments are zero before the first step where the first moment is not, "
        f"which {sick[0].dtype} does not explain: the first update of {worst.name} is {times} as long as with its "
        "optimizer state begun anew",
        where=where,
        also=tuple(_place(m.name, m.module, where.op) for m in sick[1:]),
        cause="bad_checkpoint",
        evidence={
            "starved": starved,
            "elements": elements,
            "largest_first_moment": max(m.largest for m in sick),
            "epsilon": worst.epsilon,
            "tensors": len(sick),
            "listed": [
                {"tensor": m.name, "starved": m.starved, "of": m.elements, "update": m.update, "fresh_update": m.fresh}
                for m in sick[:MAX_LISTED]
            ],
        },
    )


def _times(moment: FlushedMoment) -> float:
    if moment.update is None or moment.fresh is None:
        return 0.0
    return moment.update / moment.fresh if moment.fresh else math.inf if moment.update else 0.0


def counter_finding(found: Sequence[HalfCounter], thresholds: Thresholds) -> Finding | None:
    """Makes the finding for stuck step counters in a half format, or else the note that the counters will be."""
    if not found:
        return None
    standing = [counter for counter in found if counter.stands]
    shown = standing or list(found)
    lengths = [length_at(counter.count, counter.betas) for counter in standing]
    length = max(lengths, key=lambda one: abs(one - 1), default=1.0)
    first = shown[0]
    severity = severity_of_standing(length, first.dtype, thresholds) if standing else "note"
    if standing:
        words = standing_words(first.dtype, first.count, length)
        message = f"{words[0].lower()}{words[1:].rstrip('.')}"
    else:
        limit = STEP_LIMITS[first.dtype]
        message = f"steps are counted in {first.dtype}: the count is {first.count:g} and will stop at {limit:g}"
    where = Where(step=0, phase="checkpoint", module=first.module, op="optimizer_state:step", tensor=first.name)
    return COUNTERS.finding(
        severity,
        message,
        where=where,
        also=tuple(_place(counter.name, counter.module, where.op) for counter in shown[1:]),
        cause="bad_checkpoint" if severity == "error" else None,
        evidence={
            "dtype": first.dtype,
            "step": first.count,
            "limit": STEP_LIMITS[first.dtype],
            "after_first_step": first.after,
            "after_first_step_in_fp32": first.widened,
            "update_length": length,
            "counters": len(shown),
        },
    )


def _place(name: str, module: str, op: str | None) -> Where:
    return Where(step=0, phase="checkpoint", module=module, op=op, tensor=name)
