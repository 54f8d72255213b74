"""When a figure that grows by a constant factor meets a limit, judged by how it has grown so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

STEADY = 0.75
"""Least ratio of the later to the earlier rate, in binades a step, of what grows by a constant factor. That has a ratio
of 1; what grows as any power of the step has at most log2(3/2) / log2(2) = 0.585 over equal times from its first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where a figure is heading.

    Attributes:
        rate: Binades a step.
        meets: Step at which it meets the limit at that rate.
        since: First step of the course.
        until: Last step seen.
    """

    rate: float
    meets: float
    since: int
    until: int

    @property
    def soon(self) -> bool:
        """Whether that is within as many steps as were seen."""
        return self.meets - self.until <= self.until - self.since


def course(points: Sequence[tuple[int, float]], limit: float) -> Course | None:
    """How a steady growth goes on; None where there is none, or it slows down, or the limit has been met.

    The rate is the least-squares slope of log2 over the steps, or that of the later half where it is the smaller one.

    Args:
        points: (step, positive finite value), ascending; at least two, and three to see a growth slow down.
        limit: Positive; where the values fall, the one below them.
    """
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return None
    rising = points[-1][1] >= points[0][1]
    sign = 1.0 if rising else -1.0
    line = [(step, sign * math.log2(value)) for step, value in points]
    left = sign * math.log2(limit) - line[-1][1]
    earlier, later = _halves(line)
    if left <= 0 or earlier <= 0 or later < STEADY * earlier:
        return None
    rate = min(_slope(line), later)
    if rate <= 0:
        return None
    return Course(rate=sign * rate, meets=line[-1][0] + left / rate, since=line[0][0], until=line[-1][0])


def _halves(line: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Rates of the first and of the second half of the time."""
    (start, first), (end, last) = line[0], line[-1]
    middle = (start + end) / 2
    at = last
    for (left, low), (right, high) in itertools.pairwise(line):
        if left <= middle <= right and right > left:
            at = low + (high - low) * (middle - left) / (right - left)
            break
    return (at - first) / (middle - start), (last - at) / (end - middle)


def _slope(line: Sequence[tuple[int, float]]) -> float:
    steps = [float(step) for step, _ in line]
    mean, level = sum(steps) / len(line), sum(value for _, value in line) / len(line)
    spread = sum((step - mean) ** 2 for step in steps)
    return sum((step - mean) * (value - level) for step, (_, value) in zip(steps, line, strict=True)) / spread
