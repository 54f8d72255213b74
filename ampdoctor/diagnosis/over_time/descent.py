"""How far a loss has come down, and how far it went up again on its way: what a rise of it is held against."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ampdoctor.diagnosis.over_time.course import HOP, LENGTH, LongCourse

MATTERS = 0.02
"""Of the way from the highest usual loss to the lowest, by which a loss must rise to matter: benchmarks/alerts holds
for harm what is above by 2 % of the loss before training."""
FALLEN = 3.0
"""Robust deviations by which the lowest usual loss must be below the first for the loss to have fallen."""
UNTRIED = 500
"""Accepted steps from the beginning of a training after which a loss that has not fallen is no beginner's any more, but
one at rest, as a fine-tuning's may be. A policy's value loss rises in this time with the returns that it learns of."""
_LATER = 1000
"""A log that begins behind this step goes on with a training that fell before."""

LEAST_LOSSES = 8
"""Losses from which a fall of theirs is told from noise."""
CLEAR_FALL = 4.0
"""Standard errors between the mean losses of two halves: by chance once in 30,000 such logs."""
LEAST_FALL = 0.01
"""Share of itself by which a loss falls that is said to fall: one without noise falls by momentum's remainder too."""


@dataclass(slots=True)
class Descent:
    """The usual losses of a run, hop by hop.

    Attributes:
        highest: The highest usual loss; -inf before one is known.
        lowest: The lowest; inf before.
        wandered: The most by which a usual loss was above the lowest before it, as of `LENGTH` steps ago.
        fallen_from: The highest before the lowest; -inf before one is known.
        falls: The lowest is below the first by `FALLEN` deviations.
        fell: So it was before these losses, with batches of another size.
        came: How far it had come down then.
    """

    highest: float = -math.inf
    lowest: float = math.inf
    wandered: float = 0.0
    fallen_from: float = -math.inf
    falls: bool = False
    fell: bool = False
    came: float = 0.0
    _first: float = math.nan
    _rises: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH // HOP))

    def follow(self, loss: LongCourse) -> None:
        """A hop more."""
        usual = loss.usual
        if math.isnan(usual):
            return
        if math.isnan(self._first):
            self._first = usual
        self.highest = max(self.highest, usual)
        if usual < self.lowest:
            self.lowest, self.fallen_from = usual, self.highest
            self.falls = self.falls or self._first > loss.value_at(FALLEN)
        if len(self._rises) == self._rises.maxlen:
            self.wandered = max(self.wandered, self._rises[0])
        self._rises.append(usual - self.lowest)

    def anew(self) -> Descent:
        """Returns that of the losses to come, which are of batches of another size and so at another height."""
        return Descent(fell=self.fell or self.falls, came=self._way())

    def _way(self) -> float:
        return max(self.came, self.highest - self.lowest)

    def is_left_by(self, loss: float, usual: float) -> bool:
        """Whether a loss is above the usual by a part of the way that training has come: near zero, all is large."""
        return loss - usual >= MATTERS * self._way()

    def is_known(self, accepted: int, began: int) -> bool:
        """Whether a rise says something: the loss has fallen, or is at rest, and is no beginner's.

        Args:
            accepted: Accepted steps so far.
            began: The first step that is known.
        """
        return self.falls or self.fell or accepted >= UNTRIED or began >= _LATER


def falls_over(values: Sequence[float]) -> bool:
    """Whether losses, in the order of their steps, fall far beyond their noise; those that are not finite are left out.

    The mean of the later half lies `CLEAR_FALL` standard errors, and `LEAST_FALL` of itself, below that of the earlier.
    """
    largest = max((abs(loss) for loss in values if math.isfinite(loss)), default=0.0)
    losses = [loss / largest for loss in values if math.isfinite(loss)] if largest else []  # squares may be too large
    if len(losses) < LEAST_LOSSES:
        return False
    half = len(losses) // 2
    early, late = losses[:half], losses[-half:]
    error = math.sqrt((statistics.variance(early) + statistics.variance(late)) / half)
    before = statistics.fmean(early)
    return before - statistics.fmean(late) > max(CLEAR_FALL * error, LEAST_FALL * abs(before))
