"""Optimizer state that cannot be, as the first replayed step shows it (AMP502, AMP504)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.optimizer.second_moment_flushed import LONGER_UPDATE
from ampdoctor.diagnosis.optimizer.second_moment_flushed import RULE as FLUSHED
from ampdoctor.diagnosis.optimizer.step_counters import RULE as COUNTERS
from ampdoctor.diagnosis.optimizer.step_counters import (
    STEP_LIMITS,
    length_at,
    severity_of_standing,
    standing_words,
)
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.run_facts import FlushedMoment, HalfCounter
from ampdoctor.evidence.thresholds import Thresholds


def flushed_finding(found: Sequence[FlushedMoment], thresholds: Thresholds) -> Finding | None:
    """Second moments of zero that make the first step too long; None where they do not.

    Args:
        found: Of each parameter that has such moments.
        thresholds: By which factor an update is too long (AMP502).
    """
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
    return Finding(
        code=FLUSHED.code,
        name=FLUSHED.name,
        severity="error",
        cause="bad_checkpoint",
        where=where,
        also=tuple(_place(m.name, m.module, where.op) for m in sick[1:]),
        message=f"{starved} of {elements} second moments are zero before the first step where the first moment is not, "
        f"which {sick[0].dtype} does not explain: the first update of {worst.name} is {times} as long as with its "
        "optimizer state begun anew",
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
        help=FLUSHED.page.action,
    )


def _times(moment: FlushedMoment) -> float:
    if moment.update is None or moment.fresh is None:
        return 0.0
    return moment.update / moment.fresh if moment.fresh else math.inf if moment.update else 0.0


def counter_finding(found: Sequence[HalfCounter], thresholds: Thresholds) -> Finding | None:
    """Step counters in a half format: that they stand still, or else, as a note, that they will.

    Args:
        found: All of them; the report names those that stand, if there are any.
        thresholds: How far off an update has to be (AMP504).
    """
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
    return Finding(
        code=COUNTERS.code,
        name=COUNTERS.name,
        severity=severity,
        cause="bad_checkpoint" if severity == "error" else None,
        where=where,
        also=tuple(_place(counter.name, counter.module, where.op) for counter in shown[1:]),
        message=message,
        evidence={
            "dtype": first.dtype,
            "step": first.count,
            "limit": STEP_LIMITS[first.dtype],
            "after_first_step": first.after,
            "after_first_step_in_fp32": first.widened,
            "update_length": length,
            "counters": len(shown),
        },
        help=COUNTERS.page.action,
    )


def _place(name: str, module: str, op: str | None) -> Where:
    return Where(step=0, phase="checkpoint", module=module, op=op, tensor=name)
