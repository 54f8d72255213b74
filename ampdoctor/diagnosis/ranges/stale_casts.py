"""AMP210: forwards use the half copies that autocast made of the weights before the weights were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.departs_in_half import DEPARTS
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, ERROR_WARNING, Threshold, Thresholds
from ampdoctor.evidence.trace import StepEvent

BETTER = Threshold(
    code="AMP210",
    name="better",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Factor by which copies that are made anew must lower the gradients' error before the kept ones are blamed (as "
    "AMP301.better): measured 100 and more where it is their doing, 1 where rounding is.",
)
RULE = register(
    "AMP210",
    "stale-casts",
    "Autocast's copies of the weights are older than the weights",
    worst="error",
    commands=REPLAYED,
    thresholds=(BETTER,),
)
ADVICE = (
    "Enter torch.autocast anew for each forward, and leave it before the weights are written (optimizer.step(), a "
    "swap, an average, a clipping); or call torch.clear_autocast_cache() after each write, or give torch.autocast "
    "cache_enabled=False."
)


@dataclass(frozen=True, slots=True)
class OldCopies:
    """Half copies that a forward read after their weights were written.

    Attributes:
        where: The write, at the user's line.
        writer: What wrote the weights, as the subject and verb of a sentence.
        weight: Name of the first weight.
        weights: Number of weights.
        used_at: The first forward that read an old copy: "FILE:LINE", else its module; "" where neither is known.
    """

    where: Where
    writer: str
    weight: str
    weights: int
    used_at: str


def may_be_stale(events: Sequence[StepEvent]) -> bool:
    """Does an optimizer step while autocast keeps its casts, and does another update follow in the same step?"""
    steps = [event for event in events if event.kind == "optimizer_step"]
    return any(event.casts_kept for event in steps[:-1])


def stale_casts_finding(
    step: int,
    error: float,
    anew: float | None,
    old: OldCopies,
    prescription: Prescription | None = None,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Finding | None:
    """The gradients are those of old weights, by as much as the writes have moved them: for small updates a note.

    Args:
        step: The step.
        error: Relative L2 error of its gradients, beside fp32's; where `anew` is None beside those with new copies.
        anew: The error with copies that are made anew at each use; None where the step cannot run in fp32.
        old: What was read after it was written.
        prescription: The change.
        thresholds: By how much the error must fall.
    """
    if not error > (thresholds[BETTER] * anew if anew is not None else 0.0):
        return None
    others = f" and {old.weights - 1} more" if old.weights > 1 else ""
    away = (
        f"{error:.2g} away from those with copies that are made anew (relative L2)"
        if anew is None
        else f"{error:.2g} away from fp32's (relative L2), and {anew:.2g} with copies that are made anew"
    )
    figures = {"gradient_error": error} | ({} if anew is None else {"gradient_error_with_new_casts": anew})
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity=_severity(error, thresholds),
        cause="stale_casts",
        where=old.where,
        message=f"step {step}: {old.writer} inside an autocast context ({old.weight}{others}), and the forwards after "
        f"that in the same context use the half copies of the old weights: the gradients are {away}",
        evidence={**figures, "weights": old.weights, "used_at": old.used_at},
        help=ADVICE,
        prescription=prescription,
    )


def _severity(error: float, thresholds: Thresholds) -> Severity:
    """An error from where runs were seen to fail (AMP207), a warning from where gradients deserve a look (AMP301)."""
    if error > thresholds[DEPARTS]:
        return "error"
    return "warning" if error > thresholds[ERROR_WARNING] else "note"
