"""The smallest set of elements whose treatment makes a trial succeed, by QuickXplain (Junker, AAAI 2004)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

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
