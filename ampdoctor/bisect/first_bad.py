"""The first bad position in an order, by halving: each question costs a replay, so none is asked twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """Where an order turns bad.

    Attributes:
        position: The first bad position.
        asked: How often `bad` was called, at most ceil(log2(n)).
    """

    position: int
    asked: int


def first_bad(n: int, bad: Callable[[int], bool]) -> FirstBad:
    """The first bad position in an order whose last position is known to be bad.

    The premise is that badness stays: where position i is bad, each after it is. Where it does not hold, the answer is
    some position that is bad, or the last one, and whose predecessor is good, or none.

    Args:
        n: Length of the order, at least 1.
        bad: Is this position bad? Called at most ceil(log2(n)) times, at most once for a position, and never for the
            last one.

    Raises:
        ValueError: The order is empty.
    """
    if n < 1:
        raise ValueError(f"an order of {n} positions has no last one that could be bad")
    low, high, asked = 0, n - 1, 0
    while low < high:
        middle = (low + high) // 2
        asked += 1
        if bad(middle):
            high = middle
        else:
            low = middle + 1
    return FirstBad(position=high, asked=asked)
