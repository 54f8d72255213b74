"""What a number was in a run's first steps: what it is held against until its usual can be relied on."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ampdoctor.diagnosis.over_time.course import RECENT, median

FIRST = 8
"""Values whose median is the first level."""
WITHIN = 400
"""Values that are held against it: so many of healthy trainings were measured for AMP741. What is usual, a median of
128, follows a climb that lasts as long."""
_LIKE = 2.0
"""Largest of them over the smallest one, from which they have no level: a loss that begins near zero, as a policy's."""


@dataclass(slots=True)
class Beginning:
    """The first values of a number, and its last ones, for its first `WITHIN` values.

    Attributes:
        count: Values so far.
        first: Median of the first `FIRST`; NaN before they are there, and where they have no level.
    """

    count: int = 0
    first: float = math.nan
    _firsts: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, value: float) -> None:
        """A finite value more."""
        if self.count >= WITHIN:
            return
        self.count += 1
        self._last.append(value)
        if self.count > FIRST:
            return
        self._firsts.append(value)
        if self.count == FIRST:
            lowest, *_, highest = ordered = sorted(self._firsts)
            if lowest > 0 and highest <= _LIKE * lowest:
                self.first = median(ordered)

    def rise(self, steps: int) -> float:
        """Returns the median of the last values over the first level; 0 where either is not known, or no more asked.

        Args:
            steps: How many of the last, at most `RECENT`.
        """
        if math.isnan(self.first) or self.count < FIRST + steps or self.count >= WITHIN:
            return 0.0
        return median(sorted(list(self._last)[-steps:])) / self.first
