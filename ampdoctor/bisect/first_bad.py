"""The first bad position in an order, by halving: each question costs a replay, so none is asked twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """Where an order turns bad, as far as it was asked.

    Attributes:
        suspects: The positions that may be the first bad one, ascending; one, unless the questions ran out.
        bad: The bad position that all suspects lead to, itself among them; the last of them in a plain order.
        asked: How often `bad` was called.
    """

    suspects: tuple[int, ...]
    bad: int
    asked: int


def first_bad(before: Sequence[int], bad: Callable[[int], bool], *, limit: int | None = None) -> FirstBad:
    """The first bad position, where the last one is known to be bad.

    Positions need not form a plain line: of branches that run side by side, a good one says nothing of another. The
    premise is that badness is handed on: where a position is bad, each that comes from it is. As in a search over a
    history with merges, a bad answer leaves what the position comes from, a good one strikes that off, and the
    position is asked that halves best. A plain order of n takes at most ceil(log2(n)) questions.

    Args:
        before: For each position the set of earlier ones that it comes from, at whatever distance, as a bit mask; of
            the last one, all that matter.
        bad: Is this position bad? Called at most once for a position, and never for the last one.
        limit: Questions that may be asked; None for as many as it takes.

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
    """The candidate whose answer leaves least in the worse case; the earliest of those."""
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
