"""Finds the first bad position in an order by halving. Each question costs a replay, so none is asked twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """Where an order turns bad, as far as it was searched.

    Attributes:
        suspects: The positions that may be the first bad one, ascending; a single one unless the questions ran out.
        bad: The bad position to which all suspects lead, itself included; in a plain order, the last of them.
        asked: Number of calls of `bad`.
    """

    suspects: tuple[int, ...]
    bad: int
    asked: int


def first_bad(before: Sequence[int], bad: Callable[[int], bool], *, limit: int | None = None) -> FirstBad:
    """Returns the first bad position of an order whose last position is known to be bad.

    Positions need not form a plain line: a good position on one of several parallel branches says nothing about
    another. The premise is that badness is passed on: if a position is bad, so is each that comes from it. As in a
    search over a history with merges, a bad answer keeps only what the position comes from, a good one removes that,
    and the next question is the one that halves best. A plain order of n takes at most ceil(log2(n)) questions.

    Args:
        before: For each position, a bit mask of the earlier ones that it comes from, directly or indirectly; for the
            last position, all that matter.
        bad: Is this position bad? Called at most once per position, and never for the last one.
        limit: Maximum number of questions; None for as many as it takes.

    Raises:
        ValueError: There is no position.
    """
    if not before:
        raise ValueError("an order of no positions has no last one that could be bad")
    known = len(before) - 1
    left = before[known] | 1 << known
    asked = 0
    while left.bit_count() > 1 and (limit is None or asked < limit):
        half = _best_half(before, left & ~(1 << known), left)
        within = before[half] | 1 << half
        asked += 1
        if bad(half):
            known, left = half, left & within
        else:
            left &= ~within
    return FirstBad(suspects=tuple(_members(left)), bad=known, asked=asked)


def _best_half(before: Sequence[int], candidates: int, left: int) -> int:
    """Returns the earliest candidate whose answer leaves the least in the worse case."""
    total = left.bit_count()

    def remaining(position: int) -> int:
        within = ((before[position] | 1 << position) & left).bit_count()
        return max(within, total - within)

    return min(_members(candidates), key=remaining)


def _members(mask: int) -> list[int]:
    members = []
    while mask:
        lowest = mask & -mask
        members.append(lowest.bit_length() - 1)
        mask ^= lowest
    return members
