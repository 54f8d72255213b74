"""AMP201 to AMP204: what is born non-finite at an op; one table of causes serves these and the others it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.replay.causes import CODES, STATE_CODES, Cause, cause_of, excess_binades, help_for
from ampdoctor.diagnosis.replay.sentences import sentence_of
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Threshold, Thresholds
from ampdoctor.evidence.trace import Birth, Operand, TensorStats, Trace

DEPARTURE = Threshold(
    code="AMP201",
    name="departure",
    default=1 / 16,
    unit="share",
    why="Share of itself by which a finite value made from an overflow is off: inf -> rsqrt -> 0 is off by 1, inf -> "
    "tanh -> 1 by 0, and a few roundings to bf16 by 2^-9 each.",
)
FORWARD_OVERFLOW = register(
    "AMP201",
    "forward-overflow",
    "An activation is beyond the compute format's range",
    worst="error",
    commands=REPLAYED,
    thresholds=(DEPARTURE,),
)
INVALID_OP = register(
    "AMP202",
    "invalid-op",
    "An op makes NaN of finite inputs: its operand or its kernel is wrong",
    worst="error",
    commands=REPLAYED,
)
BACKWARD_OVERFLOW = register(
    "AMP203", "backward-overflow", "A gradient is beyond the compute format's range", worst="error", commands=REPLAYED
)
BAD_DATA = register(
    "AMP204", "bad-data", "The batch is non-finite, or beyond the compute format", worst="error", commands=REPLAYED
)

_BEYOND_FLOAT32 = "float32 does not hold it either: bring the op's inputs down, look at the learning rate and the data."


def finding_of_birth(
    birth: Birth,
    *,
    cause: Cause | None = None,
    severity: Severity = "error",
    prescription: Prescription | None = None,
    others: Sequence[Birth] = (),
) -> Finding:
    """The finding for one birth.

    Args:
        birth: The culprit.
        cause: Where a replay showed more than the birth alone (a lower scale cures, no scale does).
        severity: As the harm is.
        prescription: The cure, replayed.
        others: Further births of the same step that harm independently.
    """
    decided = cause or cause_of(birth)
    code = STATE_CODES.get(birth.origin, CODES[decided]) if decided == "bad_checkpoint" else CODES[decided]
    return Finding(
        code=code,
        name=rules()[code].name,
        severity=severity,
        message=sentence_of(birth, decided),
        cause=decided,
        where=birth.where,
        evidence=birth_numbers(birth, others),
        help=_help(birth, decided),
        prescription=prescription,
    )


def _help(birth: Birth, cause: Cause) -> str:
    beyond = birth.recomputed is not None and birth.recomputed.finite32 is False
    return _BEYOND_FLOAT32 if beyond and cause in ("forward_overflow", "backward_overflow") else help_for(birth, cause)


def birth_numbers(birth: Birth, others: Sequence[Birth]) -> dict[str, Any]:
    """Returns the figures behind a birth, as evidence of a finding; `others` are told together with it."""
    verdict = birth.recomputed
    numbers: dict[str, Any] = {
        "kernel": birth.kernel,
        "origin": birth.origin,
        "inputs": [_shown(stats) for stats in birth.inputs],
        "outputs": [_shown(stats) for stats in birth.outputs],
        "harmed": list(birth.harms[:8]),
        "harmed_count": len(birth.harms),
    }
    if verdict is not None:
        numbers["float64"] = {"finite": verdict.finite, "amax": verdict.amax, "limit": verdict.limit}
        numbers["excess_binades"] = excess_binades(birth)
        if verdict.overflow is not None:
            numbers["overflows_inside"] = verdict.overflow
        if verdict.returns is False:
            numbers["comes_again"] = False
        if verdict.finite32 is not None:
            numbers["float32"] = {"finite": verdict.finite32, "amax": verdict.amax32}
    if birth.operand is not None:
        numbers["operand"] = _shown_operand(birth.operand)
    if birth.departs and not birth.harms:
        numbers["departs"] = birth.departs
    if others:
        numbers["also"] = [
            {
                "phase": b.where.phase,
                "module": b.where.module,
                "op": b.where.op,
                "nonfinite": b.where.nonfinite,
                **({"tensor": b.where.tensor} if b.origin == "data" and b.where.tensor else {}),
            }
            for b in others[:8]
        ]
        numbers["also_count"] = len(others)
    return numbers


def _shown_operand(operand: Operand) -> dict[str, Any]:
    source = operand.source
    return {
        "made_by": operand.made_by,
        "op": operand.op,
        "module": operand.module,
        "source": None if source is None else {"file": source.file, "line": source.line},
        "dtype": operand.dtype,
        "here": operand.here,
        "float64": operand.float64,
        "fraction": operand.fraction,
        "amax": operand.amax,
    }


def _shown(stats: TensorStats) -> dict[str, Any]:
    return {
        "name": stats.name,
        "dtype": stats.dtype,
        "shape": list(stats.shape),
        "amax": stats.amax,
        "nans": stats.nans,
        "infs": stats.infs,
        "zeros": stats.zeros,
    }


def is_absorbed(birth: Birth) -> bool:
    """Was an infinity computed that is gone before it reaches the loss, a gradient or the run's state?"""
    return birth.origin == "op" and birth.where.nonfinite == "inf" and not birth.harms


def departing(trace: Trace, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Birth, ...]:
    """Overflows that left no non-finite value behind but a finite one that is far from what it should be.

    Both values are computed in float64, so rounding plays no part: inf -> rsqrt -> 0 departs by 1.0, inf * 1e-5 -> tanh
    by 0.3; inf -> tanh -> 1 and inf -> clamp -> max depart by 0. It is asked only where the gradients depart from fp32
    as well.

    Args:
        trace: Of the step.
        thresholds: How far is far (AMP201).
    """
    most = thresholds[DEPARTURE]
    return tuple(birth for birth in trace.births if not birth.harms and birth.departs > most)
