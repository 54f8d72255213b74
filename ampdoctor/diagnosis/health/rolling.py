"""Rolling statistics of a run: the usual value of a number over the last steps, and how far a value is from it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ampdoctor.evidence.log_records import StepLine

LENGTH = 128  # accepted steps that define what is usual: between 100 (ZClip) and 256 (OLMo) in public rules
RECENT = 16  # the last of these: their median shows a change of level
LEAST = 32  # with fewer values, nothing is reported
HOP = 16  # values between two sortings: until the next one, median and deviation stay the same
SPANS = (4, 8, 16)
"""Numbers of last values whose mean is compared with the usual. A few values show a steep climb, more values a slow
one. None is longer than `RECENT`, so that no value is on both sides."""
FLOOR = 0.02
"""Smallest robust deviation that is assumed, as a share of the value: after a quiet stretch, a small move must not be
an alarm."""
FADES = 0.999  # factor per value by which the memory of a departure fades: it lasts about a thousand values
MOST = 5.0  # most deviations that one value counts in a mean: a single outlier is a jump, not a climb
_ROBUST = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
_TAIL = 0.8 / 1.645
"""Times the distance from the median to the 95th percentile: four fifths of the standard deviation of a normal
distribution, and more than that where large values are frequent."""


_Place: TypeAlias = Callable[[float], float]
_LEVEL = (0.0,) * len(SPANS)


class RollingStats:
    """Rolling median and robust deviation (MAD) of one number; in logarithms where all values are positive.

    The spikes that the rules look for do not move median and MAD; where large values are usual, the upper tail counts.
    This is a hot path: the window is sorted on demand, at most once a hop, and the results do not depend on when they
    are read. `highest` and `lowest` cover the window and the values since.
    """

    def __init__(self) -> None:
        self._values: list[float] = []  # the window as of the last hop, then the values since
        self._window = 0  # length of the window
        self._sorted = False  # whether the fields below belong to this window
        self._logs = True
        self._middle = math.nan
        self._deviation = 1.0
        self.highest, self.lowest = -math.inf, math.inf
        self.count = 0

    def add(self, value: float) -> None:
        """Adds a finite value."""
        self._values.append(value)
        if value > self.highest:  # noqa: PLR1730 - max() is slower, and every value passes here
            self.highest = value
        if value < self.lowest:  # noqa: PLR1730
            self.lowest = value
        self.count += 1
        if self.count % HOP == 0:
            self._hop()

    @property
    def usual(self) -> float:
        """Median of the values before the last `RECENT`, as of the last hop; NaN for fewer than `LEAST` values."""
        return self.value_at(0.0)

    @property
    def recent(self) -> float:
        """Median of the last `RECENT` values as of the last hop; NaN for fewer than `LEAST` values."""
        if self.count < LEAST:
            return math.nan
        self._know()
        last = sorted(self._values[self._window - RECENT : self._window])
        return _exp(median(last, math.log)) if self._logs else median(last)

    @property
    def latest(self) -> float:
        """Median of the last `SPANS[0]` values; NaN without one."""
        last = sorted(self._values[-SPANS[0] :])
        return median(last) if last else math.nan

    def above(self, value: float) -> float:
        """Returns how far a value is above the usual, in robust deviations; 0 while that is not known."""
        if self.count < LEAST:
            return 0.0
        if not self._sorted:
            self._sort()
        at = math.log(value) if self._logs and value > 0 else self._place(value)  # hot: every value passes here
        return (at - self._middle) / self._deviation

    def outside(self, value: float) -> float:
        """Returns how far a value is above (positive) or below (negative) the window, in logarithms or its own unit."""
        if self.count < LEAST or self.lowest <= value <= self.highest:
            return 0.0
        self._know()
        at = self._place(value)
        return max(0.0, at - self._place(self.highest)) + min(0.0, at - self._place(self.lowest))

    def lifts(self) -> tuple[float, ...]:
        """Returns how far the mean over each of `SPANS` is above the usual, in robust deviations; 0 while unknown."""
        if self.count < LEAST + RECENT:
            return _LEVEL
        ways = list(map(self._counted, self._values[-RECENT:]))
        return tuple([sum(ways[-span:]) / span for span in SPANS])

    def value_at(self, deviations: float) -> float:
        """Returns the value that lies so many robust deviations above the usual; NaN while that is not known."""
        self._know()
        at = self._middle + deviations * self._deviation
        return _exp(at) if self._logs else at

    def _hop(self) -> None:
        del self._values[:-LENGTH]
        self._window, self._sorted = len(self._values), False
        self.highest, self.lowest = max(self._values), min(self._values)

    def _know(self) -> None:
        if not self._sorted and self.count >= LEAST:
            self._sort()

    def _sort(self) -> None:
        recent = self._window - RECENT
        older = sorted(self._values[:recent])
        self._logs = older[0] > 0 and min(self._values[recent : self._window]) > 0
        place = math.log if self._logs else float  # monotonic: only a few values need their logarithm
        self._middle = median(older, place)
        floor = FLOOR if self._logs else FLOOR * max(abs(self._middle), 1e-12)
        tail = _TAIL * (place(older[int(0.95 * (len(older) - 1))]) - self._middle)
        self._deviation = max(_ROBUST * _median_distance(older, place, self._middle), tail, floor)
        self._sorted = True

    def _counted(self, value: float) -> float:
        return max(-MOST, min(MOST, self.above(value)))

    def _place(self, value: float) -> float:
        if not self._logs:
            return value
        return math.log(value) if value > 0 else -math.inf


class LongRollingStats(RollingStats):
    """Rolling statistics of a number that is judged at every step, with a memory of large values before the window."""

    def __init__(self) -> None:
        super().__init__()
        self._farthest = self._height = 0.0
        self._ways = [0.0] * RECENT  # how far the last values are above the usual, at least 0

    def add(self, value: float, above: float | None = None) -> None:
        """Adds a finite value; `above` is the result of `above(value)`, where the caller has it."""
        way = self.above(value) if above is None else above
        way = 0.0 if way < 0.0 else MOST if way > MOST else way  # noqa: FURB136 - as above
        self._height += way - self._ways[-RECENT]
        self._ways.append(way)
        RollingStats.add(self, value)  # `super()` takes longer, and every value passes here

    def height(self) -> float:
        """Returns the sum, over the last `RECENT` values, of how far each is above the usual (at least 0).

        This is an upper bound on each mean of `lifts` times its span.
        """
        if not self._sorted:
            self._know()
        return self._height

    def beyond(self, value: float) -> float:
        """Returns how far a value lies beyond the window's maximum, relative to (maximum - median); 0 within.

        A number with a heavy tail takes large values now and then. The largest value before the window counts a
        quarter, and fades. In logarithms, or in the value's own unit where values are not positive.
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
        if not self._sorted:
            self._sort()
        return self._place(value) - self._middle


def median(ordered: Sequence[float], place: _Place = float) -> float:
    """Returns the median of `place` of the sorted values."""
    middle, odd = divmod(len(ordered), 2)
    if odd:
        return place(ordered[middle])
    low, high = place(ordered[middle - 1]), place(ordered[middle])
    return (low + high) / 2 if math.isfinite(low + high) else low / 2 + high / 2


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _median_distance(ordered: Sequence[float], place: _Place, middle: float) -> float:
    """Returns the median of the distances of the sorted values' places from `middle`."""
    count = len(ordered) // 2 + 1  # the nearest values, up to the one above the middle, are neighbours
    low, high = 0, len(ordered) - count
    while low < high:
        at = (low + high) // 2
        if middle - place(ordered[at]) > place(ordered[at + count]) - middle:
            low = at + 1
        else:
            high = at
    ends = (ordered[low], ordered[low + 1], ordered[low + count - 2], ordered[low + count - 1])
    first, second, last_but_one, last = [abs(place(value) - middle) for value in ends]
    if len(ordered) % 2:
        return max(first, last)
    return (max(first, last) + (max(second, last) if first > last else max(first, last_but_one))) / 2


# -- a number in a run's first steps: the reference while the usual value cannot be relied on --


FIRST = 8  # their median is the first level
WITHIN = 400
"""Values that are compared with the first level: AMP741 was measured on so many of healthy trainings. The usual value,
a median of 128, follows a climb of that length."""
_LIKE = 2.0
"""Largest of the first values over the smallest. Beyond it they have no level: the loss begins near zero, as in
reinforcement learning."""


@dataclass(slots=True)
class Beginning:
    """The first values of a number and its last ones, while it has at most `WITHIN` values.

    `first` is the median of the first `FIRST` values; NaN before, and where they have no level.
    """

    count: int = 0
    first: float = math.nan
    _firsts: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, value: float) -> None:
        """Adds a finite value."""
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
        """Returns the median of the last `steps` (at most `RECENT`) values over the first level; 0 if unknown."""
        if self.count >= WITHIN or self.count < FIRST + steps or math.isnan(self.first):
            return 0.0
        return median(sorted(list(self._last)[-steps:])) / self.first


# -- how far a loss has fallen, and how far it rose on the way: the measure of a rise --


MATTERS = 0.02
"""A rise of the loss matters from this share of (highest usual loss - lowest) on: benchmarks/alerts counts a rise by 2
% of the loss before training as harm."""
FALLEN = 3.0  # robust deviations by which the lowest usual loss must be below the first for the loss to have fallen
UNTRIED = 500
"""Accepted steps after which a loss that has not fallen is at rest, as in a fine-tuning, and no longer at its start. In
reinforcement learning, the value loss rises in this time with the returns."""
_LATER = 1000  # a log that begins after this step continues a training whose loss fell before

LEAST_LOSSES = 8  # among fewer losses, a fall may be noise
CLEAR_FALL = 4.0  # standard errors between the mean losses of two halves: by chance once in 30,000 such logs
LEAST_FALL = 0.01  # least relative fall of a loss: momentum alone lowers a loss without noise too


@dataclass(slots=True)
class LossDescent:
    """The usual losses of a run, hop by hop."""

    highest: float = -math.inf  # -inf before one is known
    lowest: float = math.inf  # inf before one is known
    max_rise: float = 0.0  # largest rise of a usual loss above the lowest before it, as of `LENGTH` steps ago
    fallen_from: float = -math.inf  # the highest before the lowest; -inf before one is known
    falls: bool = False  # the lowest is below the first by `FALLEN` deviations
    fell: bool = False  # it had fallen before these losses, with another batch size
    came: float = 0.0  # how far it had fallen then
    _first: float = math.nan
    _rises: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH // HOP))

    def follow(self, loss: LongRollingStats) -> None:
        """Adds a hop."""
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
            self.max_rise = max(self.max_rise, self._rises[0])
        self._rises.append(usual - self.lowest)

    def anew(self) -> LossDescent:
        """Returns a new one after a change of the batch size, which moves the level of the losses."""
        return LossDescent(fell=self.fell or self.falls, came=self._way())

    def _way(self) -> float:
        return max(self.came, self.highest - self.lowest)

    def is_left_by(self, loss: float, usual: float) -> bool:
        """Returns whether a loss is above the usual by `MATTERS` of its total fall: near zero, any factor is large."""
        return loss - usual >= MATTERS * self._way()

    def is_known(self, accepted: int, began: int) -> bool:
        """Returns whether a rise means something: the loss has fallen, or is past its start."""
        return self.falls or self.fell or accepted >= UNTRIED or began >= _LATER


def falls_over(values: Sequence[float]) -> bool:
    """Returns whether losses, in the order of their steps, fall far beyond their noise; ignores non-finite ones.

    The mean of the later half lies `CLEAR_FALL` standard errors, and `LEAST_FALL` of itself, below that of the earlier.
    """
    largest = max((abs(loss) for loss in values if math.isfinite(loss)), default=0.0)
    losses = [loss / largest for loss in values if math.isfinite(loss)] if largest else []  # squares may overflow
    if len(losses) < LEAST_LOSSES:
        return False
    half = len(losses) // 2
    early, late = losses[:half], losses[-half:]
    error = math.sqrt((statistics.variance(early) + statistics.variance(late)) / half)
    before = statistics.fmean(early)
    return before - statistics.fmean(late) > max(CLEAR_FALL * error, LEAST_FALL * abs(before))


# -- the batches of a run: their size, their content, and whether they repeat --


STEADY = 16  # steps of one batch size after which another is a change; where sizes vary all the time, none is
REMEMBERED = 65_536  # batches whose fingerprints are kept: an epoch of most trainings
_SHORT = 1 / 16
"""Batches repeat in a short cycle if it is at most this share of the new batches before: a second epoch is as long as
the first."""


@dataclass(slots=True)
class BatchSize:
    """The batch size: constant for a long time, or varying."""

    changed: bool = False  # the size has changed for good: the second step in a row with the new size
    other: bool = False  # this batch has another size than those before: the last of an epoch, or the first of many
    _usual: int | None = None
    _steps: int = 0
    _new: int | None = None

    def add(self, elements: int | None) -> None:
        """Adds a step."""
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
    """Whether batches repeat, after many new ones."""

    steps: int = 0  # steps in a row, up to this one, whose batch repeats in a short cycle
    cycle: int = 0  # steps back to the last equal batch; 0 for a new one
    new_before: int = 0  # new batches in a row before the first repeated one
    _seen: dict[int, int] = field(default_factory=dict)
    _count: int = 0

    def add(self, fingerprint: int | None) -> None:
        """Adds a step that was not skipped."""
        if fingerprint is None:
            self.steps = self.cycle = 0
            return
        self._count += 1
        last = self._seen.pop(fingerprint, None)
        self._seen[fingerprint] = self._count
        if last is None:
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self.new_before = 1 if self.steps or self.cycle else self.new_before + 1
            self.steps = self.cycle = 0
            return
        self.cycle = self._count - last
        short = self.cycle <= self.new_before * _SHORT
        self.steps = self.steps + 1 if short else 0
        if not short:
            self.new_before = 0


@dataclass(slots=True)
class BatchCourses:
    """The usual batches of a run."""

    size: BatchSize = field(default_factory=BatchSize)
    repeats: Repeats = field(default_factory=Repeats)
    rms: RollingStats = field(default_factory=RollingStats)  # root mean square, without this step's
    zeros: RollingStats = field(default_factory=RollingStats)  # share of zeros, without this step's

    def add(self, line: StepLine) -> None:
        """Adds a step; `end_of` adds its numbers to the usual ones."""
        if line.batch_elements is not None or self.size.changed or self.size.other:
            self.size.add(line.batch_elements)
        if self.size.changed:  # longer sequences have another share of padding, say
            self.rms, self.zeros = RollingStats(), RollingStats()
        if not line.skipped:
            self.repeats.add(line.batch_fingerprint)

    def end_of(self, line: StepLine) -> None:
        """Adds the numbers of a finished step to the usual ones."""
        if line.batch_rms is not None and line.batch_zero_share is not None:
            self.rms.add(line.batch_rms)
            self.zeros.add(line.batch_zero_share)
