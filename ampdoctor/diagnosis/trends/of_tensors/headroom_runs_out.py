"""AMP726: a tensor in a half format drifts towards the format's largest number."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, ahead, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import TensorMoment, medians, slope
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

NEAR = Threshold(
    code="AMP726",
    name="near",
    default=2.0,
    unit="binades",
    lowest=0.0,
    highest=20.0,
    why="Of headroom below which a drift towards the limit is a warning: a batch's largest value exceeds the usual by "
    "a factor of two to four now and then.",
)
HORIZON = Threshold(
    code="AMP726",
    name="horizon",
    default=2000,
    unit="steps",
    lowest=1,
    highest=10_000_000,
    why="Within which the headroom must end, at its present drift.",
)
RULE = register(
    "AMP726",
    "headroom-runs-out",
    "An activation grows towards the largest number of its format",
    worst="warning",
    commands=WATCHED,
    thresholds=(NEAR, HORIZON),
)
LOOKS = 8
_STEADY = 5
"""Of the seven changes between eight looks, those that must go down."""
_LEAST_DRIFT = 0.5
"""Binades of headroom lost over the looks: less is noise."""


@RULE.judges(TensorMoment)
def _headroom_runs_out(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    if moment.seen < LOOKS:
        return
    rows = moment.rows("activation")
    rooms = moment.values("headroom_binades", rows)[:, -LOOKS:]
    known = np.isfinite(rooms).all(axis=1)
    rows, rooms = rows[known], rooms[known]
    if not len(rows):
        return
    drift = slope(moment.steps[-LOOKS:], rooms)
    steady = (np.diff(rooms, axis=1) < 0).sum(axis=1) >= _STEADY
    lost = medians(rooms[:, :3]) - medians(rooms[:, -3:])
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(drift < 0, rooms[:, -1] / -drift, np.inf)
    hit = np.flatnonzero(steady & (lost >= _LEAST_DRIFT) & (left <= thresholds[HORIZON]))
    if not len(hit):
        return
    worst = hit[np.argmin(left[hit])]
    now = float(rooms[worst, -1])
    overflowed = now <= 0 or bool((moment.values("nonfinite", rows[worst : worst + 1])[:, -LOOKS:] > 0).any())
    said = (
        "has overflowed its format's largest number"
        if overflowed
        else f"is {now:.1f} binades below its format's largest number, and loses {-drift[worst] * 1000:.2g} in 1,000 "
        f"steps: it overflows {ahead(float(left[worst]))}"
    )
    severity: Severity = "warning" if now < thresholds[NEAR] else "note"
    yield over_time_finding(
        RULE,
        severity,
        f"The output of {TENSOR} {said}.",
        step=moment.line.step,
        first="logits",
        phase="forward",
        tensor=moment.tensors[rows[worst]],
        also=[moment.tensors[rows[i]] for i in hit if i != worst],
        evidence={
            "headroom_binades": now,
            "binades_per_step": float(drift[worst]),
            "steps_left": float(left[worst]),
            "tensors": len(hit),
        },
    )
