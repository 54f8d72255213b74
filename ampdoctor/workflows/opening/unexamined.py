"""Replayed steps that show too little to be called healthy, though nothing in them is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampdoctor.evidence.report import ErrorNote

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import StepOutcome
    from ampdoctor.probes.cheap.nonfinite import Observation
    from ampdoctor.replay.session import Session


def unexamined(
    session: Session, outcomes: Sequence[StepOutcome], observed: Sequence[tuple[Observation, ...]]
) -> ErrorNote | None:
    """What was missing in all of these steps, so that there was nothing to examine; None where enough was seen.

    Args:
        session: The run, after them.
        outcomes: How they ended.
        observed: What the cheap look saw in each.
    """
    if not saw_anything(outcomes, observed):
        return ErrorNote(what="steps", kind="empty", message="no step had a loss or a gradient: nothing was examined")
    if not _trains(session, outcomes, observed):
        said = "no parameter of the model or of an optimizer requires a gradient: nothing trains, and only the forward"
        return ErrorNote(what="parameters", kind="empty", message=f"{said} was looked at")
    return None


def never_updated(outcomes: Sequence[StepOutcome], *, moves: bool) -> ErrorNote | None:
    """What a run lacks whose steps neither call an optimizer nor move a parameter: no update was examined.

    Args:
        outcomes: How the steps ended.
        moves: A parameter that an optimizer holds has moved (an update by hand), or no optimizer holds one.
    """
    called = any(event.kind in ("step", "optimizer_step") for outcome in outcomes for event in outcome.events)
    if moves or called or any(outcome.optimizer_steps or outcome.raised for outcome in outcomes):
        return None
    said = f"no optimizer stepped in {len(outcomes)} replayed steps and no parameter moved, so no update was examined"
    change = "call optimizer.step() (or scaler.step(optimizer)) in the step; a step that accumulates needs more --steps"
    return ErrorNote(what="updates", kind="empty", message=f"{said}: {change}")


def saw_anything(outcomes: Sequence[StepOutcome], observed: Sequence[tuple[Observation, ...]]) -> bool:
    """Did a step leave a loss, or a gradient?"""
    return _graded(observed) or any(outcome.loss is not None for outcome in outcomes)


def _trains(session: Session, outcomes: Sequence[StepOutcome], observed: Sequence[tuple[Observation, ...]]) -> bool:
    """Can a parameter get a gradient? If none can, torch's backward raises; the replay's own step leaves it out.

    A step of the user's may free its parameters for a while, or update them without any gradient that is kept.
    """
    owned = (p for one in session.optimizers.values() for group in one.param_groups for p in group["params"])
    parameters = (*session.model.parameters(), *owned)
    # a pure function has none that could be free
    free = not parameters or any(parameter.requires_grad for parameter in parameters)
    return free or _graded(observed) or any(outcome.optimizer_steps for outcome in outcomes)


def _graded(observed: Sequence[tuple[Observation, ...]]) -> bool:
    return any(one.kind == "grad" for step in observed for one in step)
