"""Runs a step with autocast's copies of the weights made anew after each update: were old ones used?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.ranges.stale_casts import ADVICE, may_be_stale, stale_casts_finding
from ampdoctor.probes.cheap.gradients import DistanceProbe
from ampdoctor.workflows.against_fp32.side_by_side import stepped
from ampdoctor.workflows.proving.changes import fresh_casts

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Comparison
    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.proving.trials import Trials


def stale_casts(
    session: Session, before: Snapshot, comparison: Comparison, trials: Trials, thresholds: Thresholds
) -> Finding | None:
    """Returns the finding that a step's gradients are those of old weights; None if they are not.

    Args:
        session: The session; it is left in any state.
        before: The state before the step.
        comparison: The step beside fp32.
        trials: Proves the change.
        thresholds: By how much the error must fall.
    """
    if not may_be_stale(comparison.events):
        return None
    before.restore()
    with session.reference():
        wide = stepped(session, comparison.step)[0]
    beside = DistanceProbe(wide.gradients, wide.times)
    before.restore()
    with fresh_casts(session), session.watched(beside):
        session.step(comparison.step)
    anew = beside.distance.relative
    if not math.isfinite(anew) or stale_casts_finding(comparison, anew, None, thresholds) is None:
        return None
    cure = trials.attempt("code", ADVICE, fresh_casts, ADVICE, stands_in=True)
    return stale_casts_finding(comparison, anew, cure, thresholds)
