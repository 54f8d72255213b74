"""Values that are not finite before the first step of a replay, and copies beside the model that are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.nonfinite import CODES, HELP, STATE_CODES, origin_numbers, sentence_of
from ampdoctor.diagnosis.scan.tensors import FP16_OVERFLOW_AT
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Cause, Finding, Prescription
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
        evidence={**_numbers(stats), "finite_amax": stats.amax},
        advice=HELP["bad_checkpoint"],
        prescription=Prescription.untried(
            f"replace {where.tensor}",
            "only an earlier checkpoint has the lost values",
            "Resume from a checkpoint in which this tensor is finite.",
        ),
    )


def hand_update_finding(where: Where, number: float | None) -> Finding:
    """Makes the finding for a parameter that an update by hand ruined; `number` is a bad argument of its op."""
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


def harms_beside_alone(origin: NonFiniteOrigin) -> bool:
    """Returns whether no part of the model is harmed, and the op is a cast to half or code after the backward."""
    if not origin.affected or not all(harm.startswith(_BESIDE) for harm in origin.affected):
        return False
    return _casts_to_half(origin) or origin.after_backward


def beside_finding(origin: NonFiniteOrigin) -> Finding:
    """Makes the finding for an origin of `harms_beside_alone`."""
    names = [harm.removeprefix(_BESIDE) for harm in origin.affected]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    cast = _casts_to_half(origin)
    deed = ", which was cast to fp16 and back" if cast else ""
    message = f"{sentence_of(origin, 'forward_overflow')}; it stays in {shown}, beside the model{deed}"
    return _beside_finding(replace(origin.where, tensor=names[0]), message, origin_numbers(origin, ()), cast=cast)


def seen_beside(name: str, stats: TensorStats, since: int, step: int, twin: tuple[str, float] | None) -> Finding:
    """Makes the finding for a tensor beside the model, finite after step `since`; `twin` is the model's of its name."""
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
    evidence = {**_numbers(stats), "finite_after": since, "nonfinite_after": step}
    return _beside_finding(where, message, evidence, cast=cast)


def _beside_finding(where: Where, message: str, evidence: dict[str, Any], *, cast: bool) -> Finding:
    advice = _THROUGH_HALF if cast else _LOST
    change = "cast a copy, not the average itself" if cast else f"mend what writes to {where.tensor}"
    return rules()["AMP114" if cast else "AMP101"].finding(
        "error",
        message,
        where=where,
        evidence=evidence,
        advice=advice,
        prescription=Prescription.untried(change, "the change is in the run's own code", advice),
    )


def _numbers(stats: TensorStats) -> dict[str, Any]:
    return {"nans": stats.nans, "infs": stats.infs, "dtype": stats.dtype, "shape": list(stats.shape)}


def _casts_to_half(origin: NonFiniteOrigin) -> bool:
    return origin.kernel in ("aten._to_copy", "aten.copy_") and any(
        stats.dtype == "float16" for stats in origin.outputs
    )
