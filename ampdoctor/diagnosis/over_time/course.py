"""What one number of a run usually is, and how far a value is from that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

LENGTH = 128
"""Accepted steps that say what is usual: numerics of the public rules lie between 100 (ZClip) and 256 (OLMo)."""
RECENT = 16
"""Of these, the last ones, whose median tells a change of level."""
LEAST = 32
"""Values below which nothing is said."""
HOP = 8
"""Values between two sortings; between them the last one's median and deviation hold."""
FLOOR = 0.02
"""Robust deviation that is assumed at least, as a share of the value: a quiet stretch must not make a tremor an
alarm."""
_ROBUST = 1.4826
"""Times the median absolute deviation: the standard deviation of a normal distribution."""


class Course:
    """The last values of a number, and their median and robust deviation; in logarithms where all are positive.

    A gradient norm is near log-normal and drifts; a loss may be negative, as a policy's is. Median and MAD are not
    moved by the very spikes that they are meant to find.

    Attributes:
        count: Values so far.
        usual: Median of the older values (all but the last `RECENT`); NaN before there are `LEAST`.
        recent: Median of the last `RECENT`.
        shift: How far `recent` is above `usual`, in robust deviations of the older values; 0 before it is known.
    """

    __slots__ = ("_deviation", "_highest", "_logs", "_middle", "_values", "count", "recent", "shift", "usual")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=LENGTH)
        self._logs = True
        self._middle = self._highest = self.usual = self.recent = math.nan
        self._deviation = 1.0
        self.count = 0
        self.shift = 0.0

    def above(self, value: float) -> float:
        """Returns how far a value is above the usual, in robust deviations; 0 where that is not known yet."""
        at = self._place(value)
        return 0.0 if math.isnan(self._middle) or math.isnan(at) else (at - self._middle) / self._deviation

    def beyond(self, value: float) -> float:
        """Returns how far a value lies beyond the highest of the window, as a share of that one's way from the median.

        A number with a heavy tail goes far now and then, and has gone there before. In logarithms (or, for what is not
        positive, in the value's own unit); 0 where it is not beyond.
        """
        at = self._place(value)
        if math.isnan(self._middle) or math.isnan(at):
            return 0.0
        reach = max(self._highest - self._middle, self._deviation)
        return max(0.0, (at - self._middle) / reach - 1)

    def value_at(self, deviations: float) -> float:
        """Returns the value that lies so many robust deviations above the usual; NaN before that is known."""
        at = self._middle + deviations * self._deviation
        return math.exp(at) if self._logs else at

    def factor(self, value: float) -> float:
        """Returns value / usual; NaN before the usual is known."""
        return value / self.usual if self.usual else math.nan

    def add(self, value: float) -> None:
        """A finite value more."""
        self._values.append(value)
        self.count += 1
        if self.count >= LEAST and self.count % HOP == 0:
            self._sort()
        elif not math.isnan(self._middle):
            at = self._place(value)
            self._highest = max(self._highest, at)

    def _sort(self) -> None:
        values = list(self._values)
        self._logs = min(values) > 0
        places = [math.log(v) for v in values] if self._logs else values
        self._middle, self._deviation = robust(places, self._floor(places))
        self._highest = max(places)
        older, last = places[:-RECENT], sorted(places[-RECENT:])
        usual, deviation = robust(older, self._floor(older))
        recent = median(last)
        self.shift = (recent - usual) / deviation
        self.usual, self.recent = (math.exp(usual), math.exp(recent)) if self._logs else (usual, recent)

    def _floor(self, places: Sequence[float]) -> float:
        if self._logs:
            return FLOOR
        return FLOOR * max(abs(median(sorted(abs(p) for p in places))), 1e-12)

    def _place(self, value: float) -> float:
        if not self._logs:
            return value
        return math.log(value) if value > 0 else math.nan


def median(ordered: Sequence[float]) -> float:
    """Returns the median of values that are in order."""
    middle, odd = divmod(len(ordered), 2)
    return ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2


def robust(values: Sequence[float], floor: float) -> tuple[float, float]:
    """Returns median and robust deviation (1.4826 times the median absolute deviation), the latter at least `floor`."""
    middle = median(sorted(values))
    return middle, max(_ROBUST * median(sorted([abs(v - middle) for v in values])), floor)
