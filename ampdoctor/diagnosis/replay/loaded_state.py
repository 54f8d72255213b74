"""Values that are not finite before the first step of a replay, and copies beside the model that are not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.catalogue import figure, rules
from ampdoctor.diagnosis.replay.nonfinite import CODES, HELP, STATE_CODES, at_step, origin_numbers, sentence_of
from ampdoctor.diagnosis.scan.tensors import BEYOND_FP16_SAID, FP16_OVERFLOW_AT
from ampdoctor.evidence.location import NonFinite, Where
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
        f"{at_step(where)}{count:,} of {math.prod(stats.shape):,} values are not finite before the first step "
        f"({where.op})",
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
    why = "" if number is None else f", with {number} among its arguments"
    cause: Cause = "optimizer_precision" if number is None else "invalid_op"
    return rules()[CODES[cause]].finding(
        "error",
        f"{at_step(where)}not finite after the loop's own update from finite tensors{why} ({where.op})",
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
    beside = replace(origin, where=replace(origin.where, tensor=names[0]))
    deed = ", which was cast to fp16 and back" if cast else ""
    message = f"{sentence_of(beside, 'forward_overflow')}. It stays in {shown}, beside the model{deed}."
    return _beside_finding(beside.where, message, origin_numbers(origin, ()), cast=cast)


def seen_beside(name: str, stats: TensorStats, since: int, step: int, twin: tuple[str, float] | None) -> Finding:
    """Makes the finding for a tensor beside the model, finite after step `since`; `twin` is the model's of its name."""
    cast = twin is not None and not stats.nans and twin[1] >= FP16_OVERFLOW_AT
    kind: NonFinite = "nan" if stats.nans else "inf"
    where = Where(step=step, phase="optimizer", module=name.rpartition(".")[0], tensor=name, nonfinite=kind)
    count = f"{stats.nans + stats.infs:,}"
    message = f"{at_step(where)}{count} values beside the model are not finite, and were after step {since}"
    if cast and twin is not None:
        message += f". {BEYOND_FP16_SAID.format(name=twin[0], amax=figure(twin[1]))}."
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
