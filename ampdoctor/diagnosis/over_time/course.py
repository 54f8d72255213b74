"""What one number of a run usually is, and how far a value is from that."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

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


_Place: TypeAlias = Callable[[float], float]
_LEVEL = (0.0,) * len(SPANS)


class Course:
    """The last values of a number, and what is usual of them; in logarithms where all are positive.

    A gradient norm is near log-normal and drifts; a loss may be negative, as a policy's is. Median and MAD are not
    moved by the very spikes that they are meant to find; where large values are usual, the upper tail counts as well.

    Every value of a long run goes through here, most are asked for little: a value is kept, and the window is sorted
    when something is asked that needs it, once a hop. What is said is the same, whenever it is asked.

    Attributes:
        count: Values so far.
        highest: The highest value of the window, and of those since; -inf before the first.
        lowest: The lowest, likewise.
    """

    __slots__ = (
        "_deviation",
        "_logs",
        "_middle",
        "_recent",
        "_sorted",
        "_values",
        "_window",
        "count",
        "highest",
        "lowest",
    )

    def __init__(self) -> None:
        self._values: list[float] = []  # the window as it was at the last hop, and what came since
        self._window = 0  # length of the former
        self._sorted = False  # what follows belongs to this window
        self._logs = True
        self._middle = self._recent = math.nan
        self._deviation = 1.0
        self.highest, self.lowest = -math.inf, math.inf
        self.count = 0

    def add(self, value: float) -> None:
        """A finite value more."""
        self._values.append(value)
        if value > self.highest:  # noqa: PLR1730 - a call of max() takes longer, and here go all values
            self.highest = value
        if value < self.lowest:  # noqa: PLR1730
            self.lowest = value
        self.count += 1
        if self.count % HOP == 0:
            self._hop()

    @property
    def usual(self) -> float:
        """Median of the older values (all but the last `RECENT`) as of the last hop; NaN before there are `LEAST`."""
        return self.value_at(0.0)

    @property
    def recent(self) -> float:
        """Median of the last `RECENT`, likewise."""
        self._know()
        return math.exp(self._recent) if self._logs else self._recent

    @property
    def shift(self) -> float:
        """How far `recent` is above `usual`, in robust deviations; 0 before they are known."""
        self._know()
        return 0.0 if self.count < LEAST else (self._recent - self._middle) / self._deviation

    @property
    def latest(self) -> float:
        """Median of the last `SPANS[0]` values; NaN without one."""
        last = sorted(self._values[-SPANS[0] :])
        return median(last) if last else math.nan

    def above(self, value: float) -> float:
        """Returns how far a value is above the usual, in robust deviations; 0 where that is not known yet."""
        if self.count < LEAST:
            return 0.0
        if not self._sorted:
            self._sort()
        at = math.log(value) if self._logs and value > 0 else self._place(value)  # every value comes here
        return (at - self._middle) / self._deviation

    def outside(self, value: float) -> float:
        """Returns how far a value lies outside of the window's values, in logarithms (or its own unit); 0 inside.

        It is positive above the highest and negative below the lowest.
        """
        if self.count < LEAST or self.lowest <= value <= self.highest:
            return 0.0
        self._know()
        at = self._place(value)
        return max(0.0, at - self._place(self.highest)) + min(0.0, at - self._place(self.lowest))

    def lifts(self) -> tuple[float, ...]:
        """Returns how far the mean of the last values of each of `SPANS` is above the usual, in robust deviations.

        0 where too few values are known.
        """
        if self.count < LEAST + RECENT:
            return _LEVEL
        ways = list(map(self._counted, self._values[-RECENT:]))
        return tuple([sum(ways[-span:]) / span for span in SPANS])

    def value_at(self, deviations: float) -> float:
        """Returns the value that lies so many robust deviations above the usual; NaN before that is known."""
        self._know()
        at = self._middle + deviations * self._deviation
        return math.exp(at) if self._logs else at

    def _hop(self) -> None:
        """Makes of the last values a new window."""
        gone = self._values[:-LENGTH]
        del self._values[:-LENGTH]
        self._window, self._sorted = len(self._values), False
        if self.highest in gone:  # the highest of all is seldom among the few that go
            self.highest = max(self._values)
        if self.lowest in gone:
            self.lowest = min(self._values)

    def _know(self) -> None:
        if not self._sorted and self.count >= LEAST:
            self._sort()

    def _sort(self) -> None:
        """Learns from the window what is usual."""
        window = self._values[: self._window]
        older, recent = sorted(window[:-RECENT]), sorted(window[-RECENT:])
        self._logs = older[0] > 0 and recent[0] > 0
        place = math.log if self._logs else float  # which keep the order: few values need theirs
        self._middle, self._recent = median(older, place), median(recent, place)
        floor = FLOOR if self._logs else FLOOR * max(abs(self._middle), 1e-12)
        tail = _TAIL * (place(older[int(0.95 * (len(older) - 1))]) - self._middle)
        self._deviation = max(_ROBUST * _median_way(older, place, self._middle), tail, floor)
        self._sorted = True

    def _counted(self, value: float) -> float:
        return max(-MOST, min(MOST, self.above(value)))

    def _place(self, value: float) -> float:
        if not self._logs:
            return value
        return math.log(value) if value > 0 else -math.inf


class LongCourse(Course):
    """A course that is asked at every step, and knows how far the number has gone before its window."""

    __slots__ = ("_farthest", "_height", "_ways")

    def __init__(self) -> None:
        super().__init__()
        self._farthest = self._height = 0.0
        self._ways = [0.0] * RECENT  # how far the last values are above the usual, but not below it

    def add(self, value: float, above: float | None = None) -> None:
        """A finite value more.

        Args:
            value: The value.
            above: What `above` has said of it, where it was asked.
        """
        way = self.above(value) if above is None else above
        way = 0.0 if way < 0.0 else MOST if way > MOST else way  # noqa: FURB136 - as above
        self._height += way - self._ways[-RECENT]
        self._ways.append(way)
        super().add(value)

    def height(self) -> float:
        """Returns how far the last `RECENT` values are above the usual, summed up without those that are below.

        No mean of `lifts` times its span is more.
        """
        if not self._sorted:
            self._know()
        return self._height

    def beyond(self, value: float) -> float:
        """Returns how far a value lies beyond the highest of the window, as a share of that one's way from the usual.

        A number with a heavy tail goes far now and then, and has gone there before; of how far it has gone before the
        window, a quarter counts, and fades. In logarithms (or, for what is not positive, in the value's own unit); 0
        where it is not beyond.
        """
        if self.count < LEAST:
            return 0.0
        way = self._way(value)
        faded = self._farthest * FADES ** (len(self._values) - self._window)
        reach = max(self._way(self.highest), self._deviation, faded / 4)
        return max(0.0, way / reach - 1)

    def _hop(self) -> None:
        if self._window >= LEAST:
            new = self._values[self._window :]
            farthest, self._farthest = self._way(max(new)), self._farthest * FADES ** len(new)
            if farthest > self._farthest:
                fading = (self._way(value) * FADES**ago for ago, value in enumerate(reversed(new)))
                self._farthest = max(self._farthest, *fading)
        super()._hop()

    def _sort(self) -> None:
        super()._sort()
        last = self._values[self._window - RECENT : self._window]
        middle, deviation = self._middle, self._deviation
        places = map(math.log, last) if self._logs else last
        ways = [(at - middle) / deviation for at in places]
        self._ways = [0.0 if way < 0.0 else MOST if way > MOST else way for way in ways]  # noqa: FURB136
        self._height = sum(self._ways)

    def _way(self, value: float) -> float:
        """How far a value is above the usual, in logarithms or its own unit."""
        if not self._sorted:
            self._sort()
        return self._place(value) - self._middle


def median(ordered: Sequence[float], place: _Place = float) -> float:
    """Returns the median of the places of values that are in order."""
    middle, odd = divmod(len(ordered), 2)
    return place(ordered[middle]) if odd else (place(ordered[middle - 1]) + place(ordered[middle])) / 2


def _median_way(ordered: Sequence[float], place: _Place, middle: float) -> float:
    """Returns the median of the ways from the median to the places: the nearer half of these lie side by side."""
    count, half = len(ordered), len(ordered) // 2
    begin = bisect_left(range(count - half), 2 * middle, key=lambda at: place(ordered[at]) + place(ordered[at + half]))
    before = middle - place(ordered[begin - 1]) if begin else math.inf
    behind = place(ordered[begin + half]) - middle if begin + half < count else math.inf
    farther = min(before, behind)
    if count % 2:
        return farther
    return (max(middle - place(ordered[begin]), place(ordered[begin + half - 1]) - middle) + farther) / 2
