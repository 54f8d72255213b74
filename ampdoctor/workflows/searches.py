"""Searches that run one trial at a time: the first bad position of an order, the smallest set that cures.

No torch here: a scan of many checkpoints searches as well as a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
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


# -- the smallest set of elements whose treatment makes a trial succeed, by QuickXplain (Junker, AAAI 2004) --

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SmallestSet(Generic[T]):
    """The elements that must be treated, in the given order; a trial with exactly these cured."""

    elements: tuple[T, ...]
    trials: tuple[tuple[frozenset[T], bool], ...]  # in order, and whether each cured; no set occurs twice

    @property
    def minimal(self) -> bool:
        """True if for each element a trial without it, but with all the others (and perhaps more), failed."""
        tried, whole = dict(self.trials), frozenset(self.elements)
        return all(len(whole) == 1 or _needs(element, whole, tried) for element in whole)


def _needs(element: T, cured: frozenset[T], tried: Mapping[frozenset[T], bool]) -> bool:
    """Whether a trial without this element, but with all the others of the set, failed."""
    return any(not well and element not in treated and cured - {element} <= treated for treated, well in tried.items())


class _OutOfTrialsError(Exception):
    """The limit of trials is reached."""


def smallest_set(
    elements: Sequence[T], cures: Callable[[frozenset[T]], bool], *, given: Sequence[T] = (), limit: int | None = None
) -> SmallestSet[T] | None:
    """Find a smallest set of elements whose treatment cures, and show that none of them can be left out.

    The set is 1-minimal, and its cure was tried even if elements interact (a treatment that does harm). None if
    treating everything does not cure.

    An element whose treatment includes that of others comes before them in `elements`, so that it is dropped first.
    `cures` runs a trial in which exactly these are treated; one with none is known to fail, and is not run. Elements of
    `given` are likely to be needed, and are tried first, by themselves. After `limit` trials the smallest set that was
    seen to cure is returned, `minimal` or not.
    """
    trials = _Trials(cures, limit)
    with suppress(_OutOfTrialsError):
        trials.search(tuple(elements), given)
    cured = [treated for treated, well in trials.tried.items() if well]
    if not cured:
        return None
    smallest = min(cured, key=len)
    return SmallestSet(tuple(one for one in elements if one in smallest), tuple(trials.tried.items())[1:])


class _Trials(Generic[T]):
    """Runs each trial once."""

    def __init__(self, cures: Callable[[frozenset[T]], bool], limit: int | None) -> None:
        self.tried: dict[frozenset[T], bool] = {frozenset(): False}
        self._cures = cures
        self._limit = limit

    def search(self, elements: tuple[T, ...], given: Sequence[T]) -> None:
        """Try until a smallest set has cured, or everything has not."""
        likely = frozenset(given)
        if self._well(likely):
            found = self._needed(frozenset(), given, fails=True)
        elif self._well(frozenset(elements)):
            rest = [element for element in elements if element not in likely]
            found = likely | self._needed(likely, rest, fails=True)
        else:
            return
        if not self._well(found):  # elements interact
            found = min((treated for treated, well in self.tried.items() if well), key=len)
        for element in sorted(found, key=elements.index):
            others = found - {element}
            if others and not _needs(element, found, self.tried) and self._well(others):
                found = others

    def _well(self, treated: frozenset[T]) -> bool:
        if treated not in self.tried:
            if self._limit is not None and len(self.tried) > self._limit:
                raise _OutOfTrialsError
            self.tried[treated] = self._cures(treated)
        return self.tried[treated]

    def _needed(self, beside: frozenset[T], among: Sequence[T], *, fails: bool = False) -> frozenset[T]:
        """Returns which elements are needed beside others; `fails`: those others alone are known not to cure."""
        if not fails and self._well(beside):
            return frozenset()
        if len(among) == 1:
            return frozenset(among)
        half = len(among) // 2
        front = self._needed(beside | set(among[half:]), among[:half])
        return front | self._needed(beside | front, among[half:], fails=not front)
