"""The loss scale of one optimizer over its steps, and which of them were skipped."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ampdoctor.evidence.log_records import StepLine

_AT_ONCE = 8.0
"""Factor from one step to the next that no growth makes: torch's is 2 by default, and 4 the largest that is in use."""
_MOST_LOSSES = 400
"""Losses of a run of skipped steps that are kept."""


@dataclass(slots=True)
class ScaleHistory:
    """A loss scale over the steps.

    Attributes:
        now: The present one; null before the first.
        first: The first one.
        highest: The highest at which a step was taken.
        falls: How often it has fallen since it last grew, not counting the falls before the first taken step.
        fallen: Binades by which it has fallen since then.
        taken: Steps that were taken.
        skipped: Steps that were skipped.
        in_a_row: Skipped steps up to this one.
        since: The first of these.
        until: The last of these.
        told: The log itself says of each of these that it was skipped.
        losses: Of these, where the log does not say it.
        unmoved: Those of them, up to this one, that have left the scale where it was.
        growths: How often it has grown.
        settled: A step has been taken with this scaler.
        anew: How often it rose as no scaler lets it rise: at once after a skipped step, or back to its first value.
        is_new: It did so with this step.
        lengths: Taken steps between the last falls, the newest at the end.
        wrong: What the log calls the scale of the last step that has one, where no scale is that; null else.
        wrong_since: The first of the steps with such a one, in a row.
        wrong_rows: How many they are.
        wrong_before: The most of them that a scale has followed.
    """

    now: float | None = None
    first: float | None = None
    highest: float = 0.0
    falls: int = 0
    fallen: float = 0.0
    taken: int = 0
    skipped: int = 0
    in_a_row: int = 0
    since: int = 0
    until: int = 0
    told: bool = True
    losses: list[float] = field(default_factory=list)
    unmoved: int = 0
    growths: int = 0
    settled: bool = False
    anew: int = 0
    is_new: bool = False
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    since_fall: int = 0
    wrong: float | None = None
    wrong_since: int = 0
    wrong_rows: int = 0
    wrong_before: int = 0
    _step: int = -1

    def hear(self, line: StepLine) -> None:
        """A step more; the one before it is settled."""
        self.is_new = False
        scale = self._heard(line)
        if scale is not None:
            before, self.now = self.now, scale
            self.unmoved = self.unmoved + 1 if line.skipped and scale == before else 0
            if before is None:
                self.first = scale
                if self.settled:  # the steps before were taken with it, and the log did not say so
                    self.highest = scale
            else:
                self._move(line, before, scale)
        self._step = line.step
        if line.skipped is not None:
            self.settle(line, skipped=line.skipped)

    def _heard(self, line: StepLine) -> float | None:
        """Returns a step's scale; None for one that no scaler has."""
        scale = line.loss_scale
        if scale is None:
            return None
        if scale > 0 and scale < math.inf:
            self.wrong_before = max(self.wrong_before, self.wrong_rows)
            self.wrong, self.wrong_rows = None, 0
            return scale
        if self.wrong is None:
            self.wrong_since = line.step
        self.wrong = scale
        self.wrong_rows += 1
        return None

    def settle(self, line: StepLine, *, skipped: bool) -> None:
        """It is known whether a step was skipped: at once, or by the step behind it."""
        if not skipped:
            self.taken += 1
            self.in_a_row, self.told = 0, True
            self.losses.clear()
            self.since_fall += 1
            self.settled = True
            if line.loss_scale is not None and self.highest < line.loss_scale < math.inf:
                self.highest = line.loss_scale
            return
        if not self.in_a_row:
            self.since = line.step
        self.until = line.step
        self.skipped += 1
        self.in_a_row += 1
        self.told = self.told and line.skipped is True
        if not line.skipped and line.loss is not None and len(self.losses) < _MOST_LOSSES:
            self.losses.append(line.loss)

    def is_replaced_before(self, line: StepLine) -> bool:
        """Whether the scale leaps back to its first value behind a run of skipped steps, which the last one ends."""
        scale, now = line.loss_scale, self.now
        leaps = scale is not None and now is not None and scale == self.first and scale >= _AT_ONCE * now
        return leaps and self.in_a_row > 0 and line.step == self._step + 1

    def _move(self, line: StepLine, before: float, scale: float) -> None:
        if scale > before and line.step == self._step + 1 and (self.in_a_row or self._leaps(before, scale)):
            self.anew += 1
            self.is_new = True
            self.falls, self.fallen, self.settled = 0, 0.0, False
        elif not self.settled:
            return
        elif scale < before:
            self.falls += 1
            self.fallen += math.log2(before / scale)
            self.lengths.append(self.since_fall)
            self.since_fall = 0
        elif scale > before:
            self.growths += 1
            self.falls, self.fallen = 0, 0.0

    def _leaps(self, before: float, scale: float) -> bool:
        return scale == self.first and scale >= _AT_ONCE * before
