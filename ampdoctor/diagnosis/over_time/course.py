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
HOP = 16
"""Values between two sortings; between them the last one's median and deviation hold."""
SPANS = (4, 8, 16)
"""Values whose mean is held against what is usual: a climb is seen in few values if it is steep, in more if it is not.
None is longer than `RECENT`, so that no value is part of both sides."""
FLOOR = 0.02
"""Robust deviation that is assumed at least, as a share of the value: a quiet stretch must not make a tremor an
alarm."""
FADES = 0.999
"""By which the memory of a departure fades a value: it counts for about a thousand."""
MOST = 5.0
"""Deviations that one value counts in a mean: a single outlier is a jump, and no climb."""
_ROBUST = 1.4826
"""Times the median absolute deviation: the standard deviation of a normal distribution."""
_TAIL = 0.8 / 1.645
"""Times the way from the median to the 95th percentile: four fifths of the standard deviation of a normal distribution,
and more than it where large values are frequent."""


class Course:
    """The last values of a number, and what is usual of them; in logarithms where all are positive.

    A gradient norm is near log-normal and drifts; a loss may be negative, as a policy's is. Median and MAD are not
    moved by the very spikes that they are meant to find; where large values are usual, the upper tail counts as well.

    Attributes:
        count: Values so far.
        usual: Median of the older values (all but the last `RECENT`); NaN before there are `LEAST`.
        recent: Median of the last `RECENT`.
        shift: How far `recent` is above `usual`, in robust deviations; 0 before they are known.
    """

    __slots__ = (
        "_deviation",
        "_farthest",
        "_highest",
        "_logarithms",
        "_logs",
        "_lowest",
        "_middle",
        "_sums",
        "_values",
        "_ways",
        "count",
        "recent",
        "shift",
        "usual",
    )

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=LENGTH)
        self._logarithms: deque[float] = deque(maxlen=LENGTH)  # -inf of what is not positive
        self._ways: deque[float] = deque(maxlen=RECENT)
        self._sums = [0.0] * len(SPANS)
        self._logs = True
        self._middle = self._highest = self._lowest = self.usual = self.recent = math.nan
        self._deviation, self._farthest = 1.0, 0.0
        self.count = 0
        self.shift = 0.0

    def above(self, value: float) -> float:
        """Returns how far a value is above the usual, in robust deviations; 0 where that is not known yet."""
        return 0.0 if self.count < LEAST else (self._place(value) - self._middle) / self._deviation

    def beyond(self, value: float) -> float:
        """Returns how far a value lies beyond the highest of the window, as a share of that one's way from the usual.

        A number with a heavy tail goes far now and then, and has gone there before; of how far it has gone before the
        window, a quarter counts, and fades. In logarithms (or, for what is not positive, in the value's own unit); 0
        where it is not beyond.
        """
        if self.count < LEAST:
            return 0.0
        reach = max(self._highest - self._middle, self._deviation, self._farthest / 4)
        return max(0.0, (self._place(value) - self._middle) / reach - 1)

    def outside(self, value: float) -> float:
        """Returns how far a value lies outside of the window's values, in logarithms (or its own unit); 0 inside.

        It is positive above the highest and negative below the lowest.
        """
        if self.count < LEAST:
            return 0.0
        at = self._place(value)
        return max(0.0, at - self._highest) + min(0.0, at - self._lowest)

    def lifts(self) -> list[float]:
        """Returns how far the mean of the last values of each of `SPANS` is above the usual, in robust deviations.

        0 where too few values are known.
        """
        if self.count < LEAST + RECENT:
            return [0.0] * len(SPANS)
        return [total / span for total, span in zip(self._sums, SPANS, strict=True)]

    @property
    def highest(self) -> float:
        """The highest value of the window; NaN before that is known."""
        return math.exp(self._highest) if self._logs else self._highest

    @property
    def latest(self) -> float:
        """Median of the last `SPANS[0]` values; NaN without one."""
        last = sorted(list(self._values)[-SPANS[0] :])
        return median(last) if last else math.nan

    def value_at(self, deviations: float) -> float:
        """Returns the value that lies so many robust deviations above the usual; NaN before that is known."""
        at = self._middle + deviations * self._deviation
        return math.exp(at) if self._logs else at

    def add(self, value: float) -> None:
        """A finite value more."""
        self._values.append(value)
        self._logarithms.append(math.log(value) if value > 0 else -math.inf)
        self.count += 1
        if self.count > LEAST:
            at = self._place(value)
            self._highest, self._lowest = max(self._highest, at), min(self._lowest, at)
            self._farthest = max(self._farthest * FADES, at - self._middle)
            self._add_way(self._way(at))
        if self.count >= LEAST and self.count % HOP == 0:
            self._sort()

    def _way(self, at: float) -> float:
        return max(-MOST, min(MOST, (at - self._middle) / self._deviation))

    def _add_way(self, way: float) -> None:
        ways, sums = self._ways, self._sums
        for i, span in enumerate(SPANS):
            sums[i] += way - (ways[-span] if len(ways) >= span else 0.0)
        ways.append(way)

    def _sort(self) -> None:
        logarithms = list(self._logarithms)
        self._logs = min(logarithms) > -math.inf
        places = logarithms if self._logs else list(self._values)
        self._highest, self._lowest = max(places), min(places)
        older = sorted(places[:-RECENT])
        self._middle = median(older)
        away = sorted([abs(at - self._middle) for at in older])
        floor = FLOOR if self._logs else FLOOR * max(abs(self._middle), 1e-12)
        tail = _TAIL * (older[int(0.95 * (len(older) - 1))] - self._middle)
        self._deviation = max(_ROBUST * median(away), tail, floor)
        recent = median(sorted(places[-RECENT:]))
        self.shift = (recent - self._middle) / self._deviation
        self.usual, self.recent = self.value_at(0.0), math.exp(recent) if self._logs else recent
        self._ways.clear()  # what is usual has moved: the last values are held against the new
        self._sums = [0.0] * len(SPANS)
        for at in places[-RECENT:]:
            self._add_way(self._way(at))

    def _place(self, value: float) -> float:
        if not self._logs:
            return value
        return math.log(value) if value > 0 else -math.inf


def median(ordered: Sequence[float]) -> float:
    """Returns the median of values that are in order."""
    middle, odd = divmod(len(ordered), 2)
    return ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2
