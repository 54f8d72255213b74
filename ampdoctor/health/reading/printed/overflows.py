"""A log of DeepSpeed in which nothing but its overflows is printed, as where Accelerate has made its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from ampdoctor.checkpoints.formats.log_files import Left, as_number
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.rows import Row

OVERFLOW = re.compile(
    rb"(?:OVERFLOW! Rank 0|\[Rank 0\] Overflow detected\.) Skipping step\. Attempted loss scale: ([0-9.e+]+),"
    rb"(?: reducing to ([0-9.e+]+))?"
)
"""What DeepSpeed prints of a step that it skips; it prints none of the others."""
_TIME = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})")
_LONGER = 1.5
"""Times the shortest time between two overflows, beyond which other steps were taken in between."""
_WHY = "DeepSpeed has printed overflows alone: steps between them are estimated from their times (steps_per_print=N)"


class OverflowRows:
    """Makes rows of overflows, each of which is printed without its step.

    Steps that were taken in between are not printed. That there was at least one is known where the scale has grown,
    or where more time has passed than between the closest two: as many are counted as fit, and one row stands for them.
    """

    def __init__(self) -> None:
        self._step = 0
        self._scale: float | None = None
        self._at: float | None = None
        self._shortest: float | None = None

    def rows(self, lines: Iterator[bytes], left: Left) -> Iterator[Row]:  # noqa: ARG002 - other lines are no loss
        """As in `LineRows`."""
        for line in lines:
            found = OVERFLOW.search(line)
            if found is not None:
                yield from self._overflow(found, _seconds(line))

    def rest(self, noticed: Noticed) -> Iterator[Row]:
        """As in `LineRows`."""
        noticed.skipped.append(Skipped(what="steps that were taken", reason=_WHY))
        return iter(())

    def _overflow(self, found: re.Match[bytes], at: float | None) -> Iterator[Row]:
        attempted = as_number(found[1].decode())
        if attempted is None:
            return
        steps = self._steps(attempted, at)
        if steps > 1:
            taken = {"skipped": 0.0} if self._scale is None else {"skipped": 0.0, "loss_scale": self._scale}
            yield Row(self._step + steps - 1, taken)
        self._step += steps
        yield Row(self._step, {"loss_scale": attempted, "skipped": 1.0})
        self._scale, self._at = as_number((found[2] or found[1]).decode()), at

    def _steps(self, attempted: float, at: float | None) -> int:
        """Returns how many steps this overflow comes after the one before."""
        steps = 2 if self._scale is not None and attempted > self._scale else 1
        passed = None if at is None or self._at is None else at - self._at
        if passed is not None and passed > 0.0:
            if self._shortest is not None and passed > _LONGER * self._shortest:
                steps = max(steps, round(passed / self._shortest))
            if self._shortest is None or passed < self._shortest:
                self._shortest = passed
        return steps


def _seconds(line: bytes) -> float | None:
    found = _TIME.search(line)
    if found is None:
        return None
    try:
        return datetime.fromisoformat(found[1].decode()).timestamp() + int(found[2]) / 1000
    except (ValueError, OverflowError, OSError):
        return None
