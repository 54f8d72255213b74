"""AMP210: forwards after an optimizer's step still use the half copies of the weights that autocast made before it."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.departs_in_half import DEPARTS
from ampdoctor.evidence.of_runs.trace import Comparison, StepEvent
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.thresholds.scaling_thresholds import ERROR_WARNING
from ampdoctor.evidence.thresholds.threshold import Threshold
from ampdoctor.evidence.where import Where

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
    "Enter torch.autocast anew for each forward and leave it before the backward and optimizer.step(); or call "
    "torch.clear_autocast_cache() after each step, or give torch.autocast cache_enabled=False."
)


def may_be_stale(events: Sequence[StepEvent]) -> bool:
    """Does an optimizer step while autocast keeps its casts, and does another update follow in the same step?"""
    steps = [event for event in events if event.kind == "optimizer_step"]
    return any(event.casts_kept for event in steps[:-1])


def stale_casts_finding(
    comparison: Comparison,
    anew: float,
    prescription: Prescription | None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Finding | None:
    """The gradients are those of old weights, by as much as the update has moved them: for small steps a note.

    Args:
        comparison: The step beside fp32.
        anew: Relative L2 error of its gradients with copies that are made anew after each update.
        prescription: The change.
        thresholds: By how much the error must fall.
    """
    error = comparison.gradient_error
    if not error > thresholds[BETTER] * anew:
        return None
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity=_severity(error, thresholds),
        cause="stale_casts",
        where=Where(step=comparison.step, phase="forward", op="autocast"),
        message=f"step {comparison.step}: an optimizer steps inside an autocast context, and the forwards after it in "
        "the same context use the half copies of the weights from before the update: the gradients are "
        f"{error:.2g} away from fp32's (relative L2), and {anew:.2g} with copies that are made anew",
        evidence={"gradient_error": error, "gradient_error_with_new_casts": anew},
        help=ADVICE,
        prescription=prescription,
    )


def _severity(error: float, thresholds: Thresholds) -> Severity:
    """An error from where runs were seen to fail (AMP207), a warning from where gradients deserve a look (AMP301)."""
    if error > thresholds[DEPARTS]:
        return "error"
    return "warning" if error > thresholds[ERROR_WARNING] else "note"
