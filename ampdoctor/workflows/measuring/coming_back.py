"""Does a step come back that is far from fp32? Only then was it of the same data as its twin.

A run may keep state that no snapshot holds: an environment, a replay buffer, a stream that is read. The step and its
twin in fp32 then saw different data, and a distance between them says nothing of precision. Where both agree, the data
were the same, and nothing is run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ampdoctor.errors import AmpdoctorError
from ampdoctor.probes.measures.zeroed import ReferenceGradients, Zeroed
from ampdoctor.workflows.proving.trials import AGREEMENT

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot


def is_far(found: Zeroed) -> bool:
    """Returns whether a step is so far from its twin that they may have been of different data."""
    return found.relative_error is not None and AGREEMENT < found.relative_error < math.inf


def comes_back(
    session: Session,
    before: Snapshot,
    step: int,
    reference: ReferenceGradients,
    *,
    found: Zeroed,
    again: Callable[[], Zeroed | None],
) -> bool:
    """Returns whether a step and its twin are the same when they are run once more.

    First the step, then the twin: of what is moved once, or to and fro, one of the two shows it. The session is left in
    any state.

    Args:
        session: The run.
        before: The state before the step.
        step: Its number.
        reference: The twin's gradients.
        found: The step's beside them.
        again: Runs the step once more, from the state before it.
    """
    twin = ReferenceGradients(reference.plan)
    try:
        before.restore()
        if again() != found:
            return False
        before.restore()
        with session.reference(), session.watched(twin):
            session.step(step)
    except AmpdoctorError:
        return False
    known = reference.weights
    return twin.weights.keys() == known.keys() and all(torch.equal(twin.weights[key], known[key]) for key in known)


def not_compared(step: int) -> str:
    """Returns the reason, as a clause, why nothing is compared in a run with a step that does not come back."""
    return f"run again from the same state, step {step} had other gradients: the run keeps state that no snapshot holds"
