"""Steps whose loss or gradient norm is not finite: whether the weights took them, as the steps behind them show.

Most logs do not say whether a step was skipped. Weights that took a NaN never give a finite loss again: a finite loss
behind such a step, or a loss scale that falls right behind it, proves that the scaler skipped it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampdoctor.evidence.log_records import StepLine

LEAST_ROWS = 3
"""Rows with a norm that is not finite, one after another: AMP703's, one or two are skipped steps as there should be."""
HOPELESS = 8
"""Steps over which they lie: AMP703's, eight halvings of the loss scale."""
SETTLING = 40
"""The same from the log's first step on: from the highest initial scale, 2^32, down to 1 are 32."""


@dataclass(slots=True)
class IllSteps:
    """What became of the steps whose loss or norm is not finite.

    Attributes:
        waiting: The first one of which nothing says yet whether the weights took it; None without one.
        lost: The first of those that the weights took, at the line at which that is known; None at all others.
        last: The log ends, and what waits will not be decided.
    """

    waiting: StepLine | None = None
    lost: StepLine | None = None
    last: bool = False
    _taken: bool = False  # those before this one, in a row
    _rows: int = 0  # that wait
    _seen_finite: bool = False

    def hear(self, line: StepLine, *, skipped: bool) -> None:
        """A step more.

        Args:
            line: The step.
            skipped: Whether the step before it was skipped, as the log or this line says.
        """
        self.lost = None
        if skipped:
            self.waiting, self._rows = None, 0
        if not is_ill(line) or line.skipped:
            if line.loss is not None or line.gradient_norm is not None:
                self._taken, self.waiting, self._rows = False, None, 0
                self._seen_finite = True
        elif self._taken:
            return
        elif line.skipped is False:
            self._lose(line)
        else:
            self._wait(line)

    def ends(self) -> None:
        """Nothing more comes."""
        self.lost, self.last = None, True

    def _wait(self, line: StepLine) -> None:
        first = self.waiting
        if first is None:
            self.waiting, self._rows = line, 1
            return
        self._rows += 1
        span = line.step - first.step + 1
        hopeless = self._rows >= LEAST_ROWS and span >= (HOPELESS if self._seen_finite else SETTLING)
        if hopeless or (line.loss is not None and not math.isfinite(line.loss)):
            self._lose(first)

    def _lose(self, line: StepLine) -> None:
        self.lost, self._taken, self.waiting, self._rows = line, True, None, 0


def is_ill(line: StepLine) -> bool:
    """Whether a step's loss or gradient norm is not finite."""
    return any(value is not None and not math.isfinite(value) for value in (line.loss, line.gradient_norm))


def proves_a_skip(before: StepLine, line: StepLine) -> bool:
    """Whether a step's line proves that the one before it was skipped, of which the log does not say it.

    Args:
        before: The step before, in the order of the log.
        line: The step; where the log leaves steps out between the two, its loss scale proves nothing.
    """
    scales = before.loss_scale, line.loss_scale
    if scales[0] is not None and scales[1] is not None and line.step == before.step + 1 and scales[1] < scales[0]:
        return True
    if not is_ill(before):
        return False
    told = line.gradient_norm if line.loss is None else line.loss
    return told is not None and math.isfinite(told)
