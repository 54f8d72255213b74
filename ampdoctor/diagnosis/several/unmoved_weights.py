"""AMP713: trained weights did not change at all."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.several.change_finding import change_finding, row_of, weights_of
from ampdoctor.diagnosis.several.stagnant_weights import stagnates
from ampdoctor.diagnosis.tensors.tensor_finding import MAX_LISTED, percent
from ampdoctor.evidence.checkpoint_stats import CheckpointChange
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

IDLE_WOULD_MOVE = Threshold(
    code="AMP713",
    name="would_move",
    default=0.5,
    unit="share",
    why="Share of a weight's elements that one update would change: half, as for AMP712.",
)
RULE = register(
    "AMP713",
    "unmoved-weights",
    "Trained weights did not change at all",
    worst="warning",
    commands=SCANNED,
    thresholds=(IDLE_WOULD_MOVE,),
)


@RULE.judges(CheckpointChange)
def _unmoved_weights(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    weights = weights_of(change)
    if not weights or not change.steps or change.steps < 0:
        return
    same = [t for t in weights if t.unchanged == t.elements and not t.nonfinite]
    least = thresholds[IDLE_WOULD_MOVE]
    idle = [t for t in same if t.moments and t.reach is not None and t.reach.lands >= least]
    if idle:
        worst = max(idle, key=lambda t: (t.elements, t.address))
        message = (
            f"{len(idle)} of {len(weights)} weights did not change at all in {change.steps} steps, {worst.address} "
            f"first, although the optimizer holds moments for them and one update would change "
            f"{percent(worst.reach.lands if worst.reach else 0)} of its values."
        )
    elif len(same) == len(weights) and not any(stagnates(t, thresholds) for t in same):
        worst = max(same, key=lambda t: (t.elements, t.address))
        message = f"No weight changed between step {change.old_step} and step {change.new_step}."
    else:
        return
    evidence = {"steps": change.steps, "tensors": len(idle or same), "listed": [row_of(t) for t in idle[:MAX_LISTED]]}
    yield change_finding(RULE, "warning" if idle else "note", worst, message, evidence, change, idle or same)
