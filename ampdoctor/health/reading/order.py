"""In which order the rows of a log come, and which of them say nothing in the end."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampdoctor.evidence.report import ErrorNote, Skipped

LATE = 8
"""Rows of steps that still wait for numbers that are logged late; and so many in a row are a stretch of a run, which
another one may have begun again."""


@dataclass(slots=True)
class Order:
    """Counts the rows of a log that a later one repeats, or undoes by falling back behind their step.

    A restart from a checkpoint is in order: it follows a stretch of steps and goes over it again. A row that stands by
    itself, or among a few, does neither.

    Attributes:
        rows: Rows, without those that only add to a step.
        repeated: Those of them that say what the row before them has said.
        undone: Those that say something else than what counts of their step, or stand from where a row fell back.
        zeros: Steps whose loss stands as 0.0 in the log, and is read as NaN.
    """

    rows: int = 0
    repeated: int = 0
    undone: int = 0
    zeros: set[int] = field(default_factory=set)
    _standing: array[int] = field(default_factory=lambda: array("q"))
    _stretch: int = 0
    _begun_again: int = 0
    _until: int = -1

    def goes_on(self, step: int) -> None:
        """Takes the step of a row, which is another than that of the row before, or has fallen back."""
        self.rows += 1
        last = self._standing[-1] if self._standing else -1
        if step <= last:
            at = bisect_left(self._standing, step)
            gone = len(self._standing) - at
            del self._standing[at:]
            if self._stretch > LATE:
                self._begun_again, self._until = self._begun_again + gone, max(self._until, last)
            else:
                self.undone += gone
            self._stretch = 0
        elif self._begun_again and step > self._until:
            if self._stretch <= LATE and 2 * self._stretch < self._begun_again:
                self.undone += self._begun_again
            self._begun_again = 0
        self._stretch += 1
        self._standing.append(step)

    def repeats(self, *, alike: bool) -> None:
        """Takes a row of the same step as the row before, which says the same or something else."""
        self.rows += 1
        self.repeated += alike
        self.undone += not alike

    @property
    def lost(self) -> int:
        """How many rows count for nothing."""
        return self.repeated + self.undone

    def left_out(self) -> Iterator[Skipped]:
        """Yields what is said of the rows that count for nothing."""
        if self.lost:
            rows = "a row of a step" if self.lost == 1 else f"{self.lost:,} rows of steps"
            them = "it" if self.lost == 1 else "each of them"
            yield Skipped(what=rows, reason=f"a later row repeats or precedes {them}")

    def errors(self, name: str) -> Iterator[ErrorNote]:
        """Yields what keeps a log from being judged: half of its rows are lost, as of two runs in one file, or more.

        Rows that are there twice, and say the same both times, are no loss.
        """
        if self.undone and 2 * self.lost >= self.rows:
            message = (
                f"A later row repeats or precedes {self.lost:,} of the {self.rows:,} rows of {name}, which are out of "
                "order: sort them, with one row for each step, or give each run its own file."
            )
            yield ErrorNote(what=name, kind="out_of_order", message=message)
