"""What harm is, and when: said of two trainings alone, before any rule has seen them."""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARE = 0.1
"""Of the twin's loss by which the sick one's must lie above it."""
OF_FIRST = 0.02
"""Share of the loss before training that is added, so that a loss near zero need not only be a little larger."""
STAYS = 40
"""Steps for which it must stay there."""
SUDDEN = 5
"""Most steps from the first at which something is wrong to harm that is called sudden; all other creeps."""


def harm_step(sick: Sequence[float], twin: Sequence[float], applied: Sequence[bool], onset: int) -> int | None:
    """Returns the step whose update does the harm; None where none does.

    It is the first applied update after which the loss on clean data lies above the healthy twin's after as many steps
    by more than a tenth of that and 2 % of the loss before training, and stays there for 40 steps, or to the end of a
    training that goes on with NaN. Where no update is applied any more, the first step without one.

    Args:
        sick: Losses on clean data before the first step and after each.
        twin: The same of the twin.
        applied: Whether each step of the sick one was applied.
        onset: The first step at which something is wrong; what comes before it is not looked at.
    """
    above = [is_above(loss, healthy, twin[0]) for loss, healthy in zip(sick, twin, strict=False)]
    run = 0
    for after in range(len(above) - 1, onset, -1):
        ended_as_nan = run == 0 and after == len(above) - 1 and not math.isfinite(sick[after])
        run = (STAYS if ended_as_nan else run + 1) if above[after] else 0
        above[after] = run >= STAYS
    first = next((after for after in range(onset + 1, len(above)) if above[after]), None)
    if first is None:
        return None
    return next((step for step in range(first - 1, len(applied)) if applied[step]), first - 1)


def is_above(sick: float, twin: float, first: float) -> bool:
    """Whether a loss lies above the twin's by the margin; NaN does."""
    return not sick <= twin * (1 + SHARE) + OF_FIRST * first


def is_sudden(onset: int, harm: int) -> bool:
    """Whether harm comes so soon after its beginning that only the very step can tell."""
    return harm - onset <= SUDDEN
