"""Tries what lets tensors move that stand still in half: fp32 for modules or for everything, code without casts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.replay.births import finding_of_birth, is_absorbed
from ampdoctor.diagnosis.replay.optimizer_precision import rounded_away, stagnation_finding, unmoved
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.workflows.against_fp32.again import Again, without_casts
from ampdoctor.workflows.against_fp32.moves import kept, moved
from ampdoctor.workflows.against_fp32.place import traced
from ampdoctor.workflows.against_fp32.side_by_side import stepped
from ampdoctor.workflows.proving import changes as change

if TYPE_CHECKING:
    from ampdoctor.diagnosis.replay.optimizer_precision import Stagnation
    from ampdoctor.evidence.of_runs.trace import Comparison, ParameterBeside
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


def standing_still(
    session: Session, before: Snapshot, comparison: Comparison, stagnation: Stagnation
) -> Finding | None:
    """Returns the finding for what stands still: its update rounds away, or an overflow has made the update zero.

    None where nothing is lost by it: the optimizer rounds by chance, or keeps what rounding loses.

    Args:
        session: The session; it is left in any state.
        before: The state before the step.
        comparison: The step beside fp32.
        stagnation: What stands still.
    """
    if _lost_nothing(Again(session, before, comparison.step), stagnation):
        return None
    step, still = comparison.step, unmoved(comparison)
    if not still or rounded_away(still):
        cure = stagnation_cure(session, before, step, stagnation)
        return replace(stagnation_finding(step, stagnation), prescription=cure)
    cure = stagnation_cure(session, before, step, stagnation, in_code=True)
    return made_zero(session, before, step, still, cure) or replace(
        stagnation_finding(step, stagnation), prescription=cure
    )


def made_zero(
    session: Session, before: Snapshot, step: int, still: Sequence[ParameterBeside], cure: Prescription
) -> Finding | None:
    """Returns the finding for an overflow that makes updates zero: a trust or clip factor of something over infinity.

    None where no infinity of the step is gone before it reaches the loss, a gradient or the run's state.

    Args:
        session: The session; it is left after the step.
        before: The state before the step.
        step: The step.
        still: The parameters whose updates are zero.
        cure: What lets them move.
    """
    births = [birth for birth in traced(session, before, step).births if is_absorbed(birth)]
    if not births:
        return None
    found = finding_of_birth(births[0], prescription=cure, others=births[1:])
    names = ", ".join(p.name for p in still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
    stand = "stands" if len(still) == 1 else "stand"
    evidence = {**found.evidence, "stands_still": [p.name for p in still[:16]], "stands_still_count": len(still)}
    return replace(
        found, message=f"{found.message}; the update is zero by it: {names} {stand} still", evidence=evidence
    )


def _lost_nothing(again: Again, stagnation: Stagnation) -> bool:
    if again.written().draws:
        return True
    names = {name for update in stagnation.updates for name in update.tensors}
    return names <= again.kept_elsewhere()


def stagnation_cure(
    session: Session, before: Snapshot, step: int, stagnation: Stagnation, *, in_code: bool = False
) -> Prescription:
    """Try fp32 for what is trained, then for everything: do the weights that move in fp32 now move?

    Args:
        session: The session; it is left in any state.
        before: The state before the step.
        step: The step.
        stagnation: What stands still.
        in_code: Code that casts to half may be why.
    """
    if change.mostly_frozen(session):
        words = change.TRAINED_IN_FP32
        plan = Prescription(kind="code", value=words, status="not_run", detail=words)
        alone = _moving(session, before, step, stagnation, plan=plan, tried=change.trained_in_fp32)
        if alone.verified:
            return replace(alone, status="intervention")
    plan = Prescription(kind="dtype", value="float32", status="not_run", detail="keep fp32 master weights")
    wide = change.compute_dtype("fp32")
    cure = _moving(session, before, step, stagnation, plan=plan, tried=wide)
    if cure.verified or not in_code:
        return cure
    advice = f"{cure.detail}, and take the casts to half out of the code that updates it"
    plan = Prescription(kind="code", value=advice, status="not_run", detail=advice)
    code = _moving(session, before, step, stagnation, plan=plan, tried=without_casts(wide))
    if code.verified:
        return replace(code, status="intervention", alternatives=(cure,))
    return cure


def _moving(
    session: Session, before: Snapshot, step: int, stagnation: Stagnation, *, plan: Prescription, tried: change.Change
) -> Prescription:
    """The plan with what its replay shows."""
    before.restore()
    values = kept(session, trained=False)
    try:
        with tried(session):
            stepped(session, step)
            moves = moved(session, values).half
    except AmpdoctorError as error:  # an update over tensors of two formats, which the user's code does not allow
        return replace(plan, reason=f"the replay with the change cannot run: {error}")
    names = [name for update in stagnation.updates for name in update.tensors]
    expected = sum(update.moved for update in stagnation.updates)
    now = sum(int((moves[name] != 0).sum()) for name in names)
    if now > 0.9 * expected:
        return replace(plan, status="verified")
    return replace(plan, status="failed", reason=f"{now} of {expected} elements move with it")
