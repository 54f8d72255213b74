"""Tries what lets tensors move that stand still in half: fp32 for their modules or for everything, code without casts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import Prescription
from ampdoctor.probes.altering.intervene import WrittenCasts
from ampdoctor.workflows.against_fp32.moves import kept, moved
from ampdoctor.workflows.against_fp32.side_by_side import stepped
from ampdoctor.workflows.proving import changes as change
from ampdoctor.workflows.proving.trials import first_cure

if TYPE_CHECKING:
    from ampdoctor.diagnosis.replay.optimizer_precision import Stagnation
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


def stagnation_cure(session: Session, before: Snapshot, step: int, stagnation: Stagnation) -> Prescription:
    """Try fp32 for the stagnating modules, then for everything: do the weights that move in fp32 now move?

    Args:
        session: The session; it is left in any state.
        before: The state before the step.
        step: The step.
        stagnation: What stands still.
    """
    modules = [stagnation.module] if stagnation.module else [update.module for update in stagnation.updates]

    def attempts() -> Iterator[Prescription]:
        if not stagnation.trained:
            plan = Prescription(
                kind="fp32_modules", value=modules, status="not_run", detail=f"keep {', '.join(modules)} in fp32"
            )
            yield _moving(session, before, step, stagnation, plan=plan, tried=change.fp32_modules(modules))
        plan = Prescription(kind="dtype", value="float32", status="not_run", detail="keep fp32 master weights")
        yield _moving(session, before, step, stagnation, plan=plan, tried=change.compute_dtype("fp32"))

    cure = first_cure(attempts())
    if cure is None:
        raise AssertionError("something is always tried")
    if cure.verified or stagnation.trained:
        return cure
    advice = f"{cure.detail}, and take the casts to half out of the code that updates it"
    plan = Prescription(kind="code", value=advice, status="not_run", detail=advice)
    code = _moving(session, before, step, stagnation, plan=plan, tried=_without_casts(modules))
    if code.verified:
        return replace(code, status="intervention", alternatives=(replace(cure, alternatives=()), *cure.alternatives))
    return cure


def _without_casts(modules: Sequence[str]) -> change.Change:
    """Returns a change: the modules in fp32, and no cast to half that is written in the step's code."""

    @contextmanager
    def changed(session: Session) -> Iterator[None]:
        with change.fp32_modules(modules)(session), WrittenCasts():
            yield

    return changed


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
