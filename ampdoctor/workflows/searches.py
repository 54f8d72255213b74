"""Searches that run one trial at a time: the first bad position of an order, the smallest set that cures.

No torch here: a scan of many checkpoints searches as well as a replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """Where an order turns bad, as far as it was searched.

    `suspects` are the positions that may be the first bad one, ascending: a single one unless the questions ran out.
    `bad` is the bad position to which all suspects lead, itself included; in a plain order, the last of them.
    """

    suspects: tuple[int, ...]
    bad: int
    asked: int  # number of calls of `bad`


def first_bad(before: Sequence[int], bad: Callable[[int], bool], *, limit: int | None = None) -> FirstBad:
    """Returns the first bad position of an order whose last position is known to be bad.

    Positions need not form a plain line: a good position on one of several parallel branches says nothing about
    another. The premise is that badness is passed on: if a position is bad, so is each that comes from it. As in a
    search over a history with merges, a bad answer keeps only what the position comes from, a good one removes that,
    and the next question is the one that halves best. A plain order of n takes at most ceil(log2(n)) questions.

    `before` has for each position a bit mask of the earlier ones that it comes from, directly or indirectly; for the
    last position, all that matter. `bad` is called at most once per position, and never for the last one; `limit`
    bounds the calls. Raises ValueError where there is no position.
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


# -- the smallest set of elements whose treatment makes a trial succeed: group testing, largest segments first --
# A trial leaves one segment of the undecided elements untreated and treats everything behind it. If that still cures,
# the whole segment needs no treatment; if not, it is halved until its first needed element is alone. Implied results
# are not tried: if a segment fails and its front half passes, the failure is in the back half.
# The sizes of the segments follow from one belief about how many elements are needed (`PRIOR`), updated by each
# finding: each trial is the one whose outcome is nearest to even. So the number of trials stays near the logarithm of
# the number of possible answers, whether one element or a third of them is needed.

T = TypeVar("T", bound=Hashable)

PRIOR = 0.75
"""Before any trial, k + 1 needed elements are this factor times as likely as k.

Chosen by computing the worst case over all places for 0.4 to 0.9: with 0.75 it is at most k(log2(n/k) + 2) + 3 trials
for every n up to 64 and k up to 3, and at most one more for k up to 8.
"""
_TERMS = 100
"""Number of terms of the belief that are summed: `PRIOR` to this power is below rounding."""

Trial = Callable[[frozenset[T]], bool]


@dataclass(frozen=True, slots=True)
class SmallestSet(Generic[T]):
    """The elements that must be treated, in the given order; a trial with exactly these cured."""

    elements: tuple[T, ...]
    trials: tuple[tuple[frozenset[T], bool], ...]  # in order, and whether each cured; no set occurs twice

    @property
    def minimal(self) -> bool:
        """True if for each element a trial without it, but with all the others (and perhaps more), failed."""
        return all(self.needs(element) for element in self.elements)

    def needs(self, element: T) -> bool:
        """Whether a trial without this element, but with all the others of the set, failed; True for a set of one."""
        others = frozenset(self.elements) - {element}
        return not others or any(not cured and others <= tried and element not in tried for tried, cured in self.trials)


class _OutOfTrialsError(Exception):
    """The limit of trials is reached."""


def trials_bound(n: int, k: int) -> float:
    """Returns k(log2(n/k) + 2) + 3, the number of trials that may be spent to find k needed elements among n."""
    return k * (math.log2(n / k) + 2) + 3 if k else 3.0


def smallest_set(
    elements: Sequence[T], cures: Trial[T], *, given: Sequence[T] = (), limit: int | None = None
) -> SmallestSet[T] | None:
    """Find a smallest set of elements whose treatment cures, and show that none of them can be left out.

    The set is 1-minimal, and its cure was tried even if elements interact (a treatment that does harm). If they do not
    interact, it is the smallest possible set, except that elements of `given` are dropped one at a time. None if
    treating everything does not cure.

    Neighbours in `elements` should be likely to fail together. An element whose treatment includes that of others comes
    before them, so that it is dropped first. `cures` runs a trial in which exactly these are treated; one with none is
    known to fail, and is not run. Elements of `given` are likely to be needed, and are tried first, by themselves.
    After `limit` trials the smallest set that was seen to cure is returned, `minimal` or not.
    """
    return _Search(tuple(elements), cures, limit).run(given)


class _Search(Generic[T]):
    def __init__(self, elements: tuple[T, ...], cures: Trial[T], limit: int | None) -> None:
        self._elements = elements
        self._cures = cures
        self._limit = limit
        self._tried: dict[frozenset[T], bool] = {frozenset(): False}
        self._weights: dict[tuple[int, int], float] = {}

    def run(self, given: Sequence[T]) -> SmallestSet[T] | None:
        try:
            best = self._found(frozenset(given))
            if best is not None:
                self._reduce(best, frozenset(given))
        except _OutOfTrialsError:
            pass
        cured = [tried for tried, well in self._tried.items() if well]
        if not cured:
            return None
        smallest = min(cured, key=len)
        ordered = tuple(element for element in self._elements if element in smallest)
        return SmallestSet(ordered, tuple(self._tried.items())[1:])

    def _try(self, treated: frozenset[T]) -> bool:
        if treated not in self._tried:
            if self._limit is not None and len(self._tried) > self._limit:
                raise _OutOfTrialsError
            self._tried[treated] = self._cures(treated)
        return self._tried[treated]

    def _found(self, given: frozenset[T]) -> frozenset[T] | None:
        """Returns a set that cures; the smallest one if no element's treatment does harm."""
        if self._try(given):
            return given
        if not self._try(frozenset(self._elements)):
            return None
        needed = set(given)
        rest = [element for element in self._elements if element not in given]
        segment = len(rest)  # the trial without any of it is known to fail
        count = 0
        while rest:
            if segment == 0:
                segment = self._group(len(rest), count)
                if self._try(frozenset((*needed, *rest[segment:]))):
                    rest, segment = rest[segment:], 0
                    continue
            while segment > 1:
                front = self._front(segment, len(rest), count)
                if self._try(frozenset((*needed, *rest[front:]))):
                    rest, segment = rest[front:], segment - front
                else:
                    segment = front
            needed.add(rest[0])
            rest, segment, count = rest[1:], 0, count + 1
        found = frozenset(needed)
        return found if self._try(found) else min((s for s, well in self._tried.items() if well), key=len)

    def _reduce(self, cured: frozenset[T], given: frozenset[T]) -> None:
        """Try without each element: all while the bound leaves room, and always if no trial shows that it is needed."""
        ordered = [element for element in self._elements if element in cured]
        for element in sorted(ordered, key=lambda e: e not in given):
            others = cured - {element}
            spoken = any(not well and others <= tried and element not in tried for tried, well in self._tried.items())
            room = len(self._tried) + len(given) <= trials_bound(len(self._elements), len(cured))
            if (room or not spoken) and others not in self._tried and self._try(others):
                cured = others

    # -- how large a segment --

    def _weight(self, undecided: int, found: int) -> float:
        """Returns the belief in all answers in which `found` are needed and any of `undecided` others may be."""
        known = self._weights.get((undecided, found))
        if known is not None:
            return known
        n, total = len(self._elements), 0.0
        for more in range(min(undecided, _TERMS) + 1):
            needed = found + more
            if needed:
                total += math.exp(needed * math.log(PRIOR) + _log_choices(undecided, more) - _log_choices(n, needed))
        self._weights[undecided, found] = total
        return total

    def _group(self, undecided: int, found: int) -> int:
        """Returns how many of the undecided have an even chance that none of them is needed."""
        whole = self._weight(undecided, found)
        return _evenly(1, undecided, lambda size: 1 - self._weight(undecided - size, found) / whole)

    def _front(self, segment: int, undecided: int, found: int) -> int:
        """Returns how many of a failing segment have an even chance to hold its first needed element."""
        whole = self._weight(undecided, found)
        fails = whole - self._weight(undecided - segment, found)
        return _evenly(1, segment - 1, lambda size: (whole - self._weight(undecided - size, found)) / fails)


def _evenly(low: int, high: int, chance: Callable[[int], float]) -> int:
    """Returns the argument in low..high at which a growing chance is nearest to a half; the smaller of two."""
    first, last = low, high
    while first < last:
        middle = (first + last) // 2
        if chance(middle) < 0.5:
            first = middle + 1
        else:
            last = middle
    if first == low:
        return first
    return first if abs(chance(first) - 0.5) < abs(chance(first - 1) - 0.5) else first - 1


def _log_choices(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
