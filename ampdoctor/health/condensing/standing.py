"""Which lines of a log stand in the end: a later attempt, restart or run undoes from its first step on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.log_records import Stamp
from ampdoctor.health.condensing.columns import Column


@dataclass(slots=True)
class Groups:
    """The attempts, restarts and runs of a log, in the order in which they began.

    Attributes:
        first: The first step of each.
    """

    first: list[int] = field(default_factory=list)
    _numbers: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def of(self, stamp: Stamp) -> int:
        """Returns the number of a line's group."""
        key = (stamp.run_id, stamp.restarts, stamp.attempt)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.first)
            self.first.append(2**63 - 1)
        return number

    def begins(self, group: int, step: int) -> bool:
        """Takes a step of a group; is it the group's first so far?"""
        if step >= self.first[group]:
            return False
        self.first[group] = step
        return True

    def undone_from(self, group: int) -> int:
        """Returns the step from which on a group's lines were undone by later ones."""
        return min(self.first[group + 1 :], default=2**63 - 1)

    def undone(self) -> Iterable[tuple[int, int]]:
        """Yields each group that was undone in part, and from which step on."""
        for group in range(len(self.first)):
            if self.undone_from(group) < 2**63 - 1:
                yield group, self.undone_from(group)


def standing(columns: Mapping[str, Column], groups: Groups) -> Mapping[str, Column]:
    """Returns the rows that stand, in the order of their steps; of several of one step in the order of arrival."""
    limits = np.array([groups.undone_from(group) for group in range(len(groups.first))], dtype=np.float64)
    steps, of = columns["step"], columns["group"].astype(np.intp)
    kept: NDArray[np.intp] = np.flatnonzero(steps < limits[of]) if len(steps) else np.empty(0, np.intp)
    if np.any(np.diff(steps[kept]) < 0):
        kept = kept[np.argsort(steps[kept], kind="stable")]
    if len(kept) == len(steps) and not np.any(np.diff(kept) != 1):
        return columns
    return {name: values[kept] for name, values in columns.items()}
