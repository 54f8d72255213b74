"""What the batches of a run usually are: how large they are, what is in them, and whether they come again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampdoctor.diagnosis.over_time.course import Course
from ampdoctor.evidence.log_records import StepLine

STEADY = 16
"""Steps with batches of one size after which another size is a change; where sizes vary all the time, none is."""
REMEMBERED = 65_536
"""Batches whose fingerprints are kept: an epoch of most trainings."""
_SHORT = 1 / 16
"""Part of the new batches before it that a cycle of batches is short of: a second epoch is as long as the first."""


@dataclass(slots=True)
class BatchSize:
    """The size of batches, which is one for a long time, or varies.

    Attributes:
        changed: With this step the size has changed for good: it is another one for the second time in a row.
        other: This step's batch has another size than the steps before: the last of an epoch, or the first of many.
    """

    changed: bool = False
    other: bool = False
    _usual: int | None = None
    _steps: int = 0
    _new: int | None = None

    def hear(self, elements: int | None) -> None:
        """A step more."""
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
    """Whether batches come again, after many that were new.

    Attributes:
        steps: Steps in a row, up to this one, whose batch came again after a short cycle.
        cycle: Steps from this batch back to the last one that was the same; 0 for a new one.
        new_before: New batches in a row before the first that came again.
    """

    steps: int = 0
    cycle: int = 0
    new_before: int = 0
    _seen: dict[int, int] = field(default_factory=dict)
    _heard: int = 0

    def hear(self, fingerprint: int | None) -> None:
        """A taken step more."""
        if fingerprint is None:
            self.steps = self.cycle = 0
            return
        self._heard += 1
        last = self._seen.pop(fingerprint, None)
        self._seen[fingerprint] = self._heard
        if last is None:
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self.new_before = 1 if self.steps or self.cycle else self.new_before + 1
            self.steps = self.cycle = 0
            return
        self.cycle = self._heard - last
        short = self.cycle <= self.new_before * _SHORT
        self.steps = self.steps + 1 if short else 0
        if not short:
            self.new_before = 0


@dataclass(slots=True)
class BatchCourses:
    """What batches usually are.

    Attributes:
        size: Of the batches.
        repeats: Whether they come again.
        rms: Course of their root mean square, without this step's.
        zeros: Course of their share of zeros, without this step's.
    """

    size: BatchSize = field(default_factory=BatchSize)
    repeats: Repeats = field(default_factory=Repeats)
    rms: Course = field(default_factory=Course)
    zeros: Course = field(default_factory=Course)

    def hear(self, line: StepLine) -> None:
        """A step more, of whose numbers `end_of` makes a part of what is usual."""
        self.size.hear(line.batch_elements)
        if self.size.changed:  # padding, say, is another share of longer sequences
            self.rms, self.zeros = Course(), Course()
        if not line.skipped:
            self.repeats.hear(line.batch_fingerprint)

    def end_of(self, line: StepLine) -> None:
        """A step is over."""
        if line.batch_rms is not None and line.batch_zero_share is not None:
            self.rms.add(line.batch_rms)
            self.zeros.add(line.batch_zero_share)
