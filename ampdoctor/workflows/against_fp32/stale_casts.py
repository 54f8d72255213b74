"""Replays a step with autocast's copies of the weights made anew at each use: were old ones used?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.ranges.stale_casts import ADVICE, OldCopies, stale_casts_finding
from ampdoctor.evidence.report import Prescription
from ampdoctor.evidence.where import Where
from ampdoctor.probes.cheap.gradients import DistanceProbe, GradientProbe
from ampdoctor.probes.ops.source import as_source
from ampdoctor.probes.trace.old_casts import OldCast, OldCastsProbe
from ampdoctor.workflows.against_fp32.side_by_side import stepped
from ampdoctor.workflows.proving.changes import fresh_casts

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Comparison
    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.proving.trials import Trials

NO_REFERENCE = "fp32 cannot run this step, so there is nothing that a step with new copies would have to agree with"


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
    step = comparison.step
    old = _old_copies(session, before, step)
    if old is None:
        return None
    before.restore()
    with session.reference():
        wide = stepped(session, step)[0]
    with fresh_casts(session):
        anew = _distance(session, before, step, wide)
    if not math.isfinite(anew):
        return None
    finding = partial(stale_casts_finding, step, comparison.gradient_error, anew, old, thresholds=thresholds)
    if finding() is None:
        return None
    return finding(trials.attempt("code", ADVICE, fresh_casts, ADVICE, stands_in=True))


def stale_casts_without_fp32(session: Session, before: Snapshot, step: int, thresholds: Thresholds) -> Finding | None:
    """As `stale_casts`, of a step that cannot run in fp32: its gradients are held against those with new copies.

    A weight is written that a backward still needs in fp32; under autocast the backward needs the half copy.

    Args:
        session: The session; it is left in any state.
        before: The state before the step.
        step: The step.
        thresholds: How far is far.
    """
    old = _old_copies(session, before, step)
    if old is None:
        return None
    before.restore()
    with fresh_casts(session):
        new = stepped(session, step)[0]
    error = _distance(session, before, step, new)
    if not math.isfinite(error):
        return None
    cure = Prescription(kind="code", value=ADVICE, status="not_run", detail=ADVICE, reason=NO_REFERENCE)
    return stale_casts_finding(step, error, None, old, cure, thresholds=thresholds)


def stalest_without_fp32(
    session: Session, before: Snapshot, steps: Iterable[int], thresholds: Thresholds
) -> Finding | None:
    """The first step whose old copies matter, else the first note: an average begins as the weights themselves.

    Args:
        session: The session; it is left in any state.
        before: The state before the first step.
        steps: The steps, one after another; each is run a few times.
        thresholds: How far is far.
    """
    note: Finding | None = None
    for step in steps:
        found = stale_casts_without_fp32(session, before, step, thresholds)
        if found is not None and found.severity != "note":
            return found
        note = note or found
        before.restore()
        session.step(step)
        before = session.snapshot()
    return note


def _distance(session: Session, before: Snapshot, step: int, other: GradientProbe) -> float:
    """Returns how far the step's gradients are from others: relative L2, of all together."""
    beside = DistanceProbe(other.gradients, other.times)
    before.restore()
    with session.watched(beside):
        session.step(step)
    return beside.distance.relative


def _old_copies(session: Session, before: Snapshot, step: int) -> OldCopies | None:
    """Returns what the step's forwards read after it was written; None where they read nothing of the kind."""
    before.restore()
    probe = OldCastsProbe()
    with session.watched(probe):
        session.step(step)
    return _described(probe.found, step) if probe.found else None


def _described(found: Sequence[OldCast], step: int) -> OldCopies:
    first = found[0]
    use, write = first.use, first.written
    source = as_source(use.line)
    if write is None:
        writer, where = "weights are replaced (`.data = ...`)", Where(step=step, phase="loss", op="autocast")
    elif write.phase == "optimizer" and not write.after_backward:
        writer, where = "an optimizer steps", Where(step=step, phase="forward", op="autocast")
    else:
        at = as_source(write.line)
        by = f"{write.op} at {at.file}:{at.line}" if at else write.op
        writer, where = f"weights are written ({by})", Where(step=step, phase="loss", op="autocast", source=at)
    return OldCopies(
        where=where,
        writer=writer,
        weight=first.weight,
        weights=len(found),
        used_at=f"{source.file}:{source.line}" if source else use.module,
    )
