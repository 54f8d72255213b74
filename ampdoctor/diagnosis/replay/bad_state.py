"""State that is bad before the first step (AMP101 to AMP103, AMP106, AMP107), as a replay says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.diagnosis.replay.causes import HELP, STATE_CODES
from ampdoctor.evidence.of_runs.trace import TensorStats
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.where import Where


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
