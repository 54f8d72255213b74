"""State that is bad before the first step (AMP101 to AMP103, AMP106, AMP107), and beside the model (AMP101, AMP114)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.births import birth_numbers
from ampdoctor.diagnosis.replay.causes import HELP, STATE_CODES
from ampdoctor.diagnosis.replay.sentences import sentence_of
from ampdoctor.diagnosis.tensors.beyond_fp16 import FP16_OVERFLOW_AT
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.trace import Birth, TensorStats

_BESIDE = "beside:"
_THROUGH_HALF = (
    "Copy it from the model, and validate a copy (copy.deepcopy(average).half()) or under autocast, which casts no "
    "weight in place."
)
_LOST = "Look at the code that writes to it, and copy it from the model: an average of Inf or NaN never recovers."
_SHOWN = 3


def state_finding(kind: str, where: Where, stats: TensorStats) -> Finding:
    """A tensor that is non-finite before the first step.

    Args:
        kind: "param", "buffer" or "optimizer_state".
        where: Its address, phase "checkpoint".
        stats: Its numbers.
    """
    code = STATE_CODES[kind]
    count = stats.nans + stats.infs
    return Finding(
        code=code,
        name=rules()[code].name,
        severity="error",
        cause="bad_checkpoint",
        where=where,
        message=f"{where.tensor} ({where.op}) holds {count} non-finite values before the first step",
        evidence={
            "nans": stats.nans,
            "infs": stats.infs,
            "dtype": stats.dtype,
            "shape": list(stats.shape),
            "finite_amax": stats.amax,
        },
        help=HELP["bad_checkpoint"],
        prescription=Prescription(
            kind="code",
            value=f"replace {where.tensor}",
            status="not_run",
            reason="only an earlier checkpoint has the lost values",
            detail="Resume from a checkpoint in which this tensor is finite.",
        ),
    )


def impossible_finding(where: Where, stats: TensorStats, negatives: int, lowest: float) -> Finding:
    """A tensor that is negative where it is a mean of squares.

    Args:
        where: Its address, phase "checkpoint".
        stats: Its numbers.
        negatives: Elements below zero.
        lowest: The least of them.
    """
    message = f"{where.tensor} ({where.op}) cannot be negative, and {negatives} values are, down to {lowest:.4g}"
    return _state_finding("AMP106", where, message, {"negatives": negatives, "lowest": lowest, **_size(stats)})


def saturated_finding(where: Where, stats: TensorStats, at_max: int) -> Finding:
    """A weight that a conversion clamped to fp16's largest number.

    Args:
        where: Its address, phase "checkpoint".
        stats: Its numbers.
        at_max: Elements of exactly that magnitude.
    """
    message = f"{where.tensor} ({where.op}) holds {at_max} values of exactly 65504, fp16's largest: they were clamped"
    return _state_finding("AMP107", where, message, {"at_max": at_max, **_size(stats)})


def _state_finding(code: str, where: Where, message: str, evidence: Mapping[str, Any]) -> Finding:
    return Finding(
        code=code,
        name=rules()[code].name,
        severity="error",
        cause="bad_checkpoint",
        where=where,
        message=message,
        evidence=evidence,
        help=HELP["bad_checkpoint"],
    )


def _size(stats: TensorStats) -> dict[str, Any]:
    return {"dtype": stats.dtype, "shape": list(stats.shape), "finite_amax": stats.amax}


def harms_beside_alone(birth: Birth) -> bool:
    """Nothing of the model is harmed, and the op is a cast to half or stands in the code after the backward."""
    if not birth.harms or not all(harm.startswith(_BESIDE) for harm in birth.harms):
        return False
    return _casts_to_half(birth) or birth.after_backward


def beside_finding(birth: Birth) -> Finding:
    """The finding for one birth of `harms_beside_alone`.

    Args:
        birth: With its harms.
    """
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
    """The finding for a tensor beside a model that was seen to be finite after one step and is not after a later one.

    Args:
        name: Of the tensor.
        stats: Its numbers.
        since: The last step after which it was seen to be finite.
        step: The first after which it is not.
        twin: The model's tensor of its name, and its largest magnitude, where that is finite.
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
    code = "AMP114" if cast else "AMP101"
    return Finding(
        code=code,
        name=rules()[code].name,
        severity="error",
        where=where,
        message=message,
        evidence=evidence,
        help=_THROUGH_HALF if cast else _LOST,
        prescription=Prescription(
            kind="code",
            value="cast a copy, not the average itself" if cast else f"mend what writes to {where.tensor}",
            status="not_run",
            reason="the change is in the run's own code",
            detail=_THROUGH_HALF if cast else _LOST,
        ),
    )


def _casts_to_half(birth: Birth) -> bool:
    return birth.kernel in ("aten._to_copy", "aten.copy_") and any(stats.dtype == "float16" for stats in birth.outputs)
