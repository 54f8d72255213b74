"""What a number of a run usually is, and how far a value is from that: over the last steps."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ampdoctor.evidence.log_records import StepLine

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


# What a number was in a run's first steps: what it is held against until its usual can be relied on.


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


# How far a loss has come down, and how far it went up again on its way: what a rise of it is held against.


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


# What the batches of a run usually are: how large they are, what is in them, and whether they come again.


STEADY = 16
"""Steps with batches of one size after which another size is a change; where sizes vary all the time, none is."""
REMEMBERED = 65_536
"""Batches whose fingerprints are kept: an epoch of most trainings."""
_SHORT = 1 / 16
"""Part of the new batches before it that a cycle of batches is short of: a second epoch is as long as the first."""


@dataclass(slots=True)
class BatchSize:
    """The size of batches, which is one for a long time, or varies.

    Attributes:
        changed: With this step the size has changed for good: it is another one for the second time in a row.
        other: This step's batch has another size than the steps before: the last of an epoch, or the first of many.
    """

    changed: bool = False
    other: bool = False
    _usual: int | None = None
    _steps: int = 0
    _new: int | None = None

    def hear(self, elements: int | None) -> None:
        """A step more."""
        self.changed = self.other = False
        if elements is None:
            return
        if elements == self._usual:
            self._steps, self._new = self._steps + 1, None
        elif self._steps < STEADY or elements == self._new:
            self.changed = self._steps >= STEADY
            self._usual, self._steps, self._new = elements, 1 + self.changed, None
        else:
            self._new, self.other = elements, True


@dataclass(slots=True)
class Repeats:
    """Whether batches come again, after many that were new.

    Attributes:
        steps: Steps in a row, up to this one, whose batch came again after a short cycle.
        cycle: Steps from this batch back to the last one that was the same; 0 for a new one.
        new_before: New batches in a row before the first that came again.
    """

    steps: int = 0
    cycle: int = 0
    new_before: int = 0
    _seen: dict[int, int] = field(default_factory=dict)
    _heard: int = 0

    def hear(self, fingerprint: int | None) -> None:
        """A taken step more."""
        if fingerprint is None:
            self.steps = self.cycle = 0
            return
        self._heard += 1
        last = self._seen.pop(fingerprint, None)
        self._seen[fingerprint] = self._heard
        if last is None:
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self.new_before = 1 if self.steps or self.cycle else self.new_before + 1
            self.steps = self.cycle = 0
            return
        self.cycle = self._heard - last
        short = self.cycle <= self.new_before * _SHORT
        self.steps = self.steps + 1 if short else 0
        if not short:
            self.new_before = 0


@dataclass(slots=True)
class BatchCourses:
    """What batches usually are.

    Attributes:
        size: Of the batches.
        repeats: Whether they come again.
        rms: Course of their root mean square, without this step's.
        zeros: Course of their share of zeros, without this step's.
    """

    size: BatchSize = field(default_factory=BatchSize)
    repeats: Repeats = field(default_factory=Repeats)
    rms: Course = field(default_factory=Course)
    zeros: Course = field(default_factory=Course)

    def hear(self, line: StepLine) -> None:
        """A step more, of whose numbers `end_of` makes a part of what is usual."""
        self.size.hear(line.batch_elements)
        if self.size.changed:  # padding, say, is another share of longer sequences
            self.rms, self.zeros = Course(), Course()
        if not line.skipped:
            self.repeats.hear(line.batch_fingerprint)

    def end_of(self, line: StepLine) -> None:
        """A step is over."""
        if line.batch_rms is not None and line.batch_zero_share is not None:
            self.rms.add(line.batch_rms)
            self.zeros.add(line.batch_zero_share)
