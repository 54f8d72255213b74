"""What trainers print of a step that they skip; and a log in which nothing else is printed.

DeepSpeed prints nothing but its overflows where Accelerate has made its configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from ampdoctor.checkpoints.log_files import Left, as_number
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.rows import Row

OVERFLOW = re.compile(
    rb"(?:OVERFLOW! Rank 0|\[Rank 0\] Overflow detected\.) Skipping step\. Attempted loss scale: ([0-9.e+]+),"
    rb"(?: reducing to ([0-9.e+]+))?"
)
"""What DeepSpeed prints of a step that it skips; it prints none of the others."""
_REDUCED = re.compile(
    rb"radient overflow(?: detected, ignoring gradient, setting loss scale to: |\.\s+Skipping step, loss scaler \d+ "
    rb"reducing loss scale to )([0-9.e+-]+)"
)
"""What fairseq and Apex print of one, with the loss scale behind it, which is half of that before."""
_TIME = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})")
_GROWN = 1.5
"""Times the scale behind the overflow before, beyond which it has grown: scalers double it, and print some digits."""
_LONGER = 1.5
"""Times the shortest time between two overflows, beyond which other steps were taken in between."""
_WHY = "DeepSpeed has printed overflows alone: steps between them are estimated from their times (steps_per_print=N)"


@dataclass(frozen=True, slots=True)
class Overflow:
    """A step that was skipped.

    Attributes:
        begins: Where in its line it begins.
        attempted: The loss scale of the step; where that is not printed, twice the one behind it.
        scale: The loss scale behind it.
        seconds: When it was printed, in seconds since 1970; None where the line does not say.
        is_told: The line says the scale of the step.
    """

    begins: int
    attempted: float
    scale: float
    seconds: float | None
    is_told: bool

    def has_grown(self, before: float) -> bool:
        """Whether the scale was larger than the one behind the skipped step before, so that steps were taken."""
        return self.attempted > _GROWN * before


def overflow_in(line: bytes) -> Overflow | None:
    """Returns the skipped step of which a line speaks."""
    if b"verflow" not in line and b"OVERFLOW" not in line:
        return None
    attempted_is_told = True
    if (found := OVERFLOW.search(line)) is not None:
        attempted, scale = (as_number((found[at] or found[1]).decode()) for at in (1, 2))
    elif (found := _REDUCED.search(line)) is not None:
        scale = as_number(found[1].decode())
        attempted = None if scale is None else 2 * scale
        attempted_is_told = False
    else:
        return None
    if attempted is None or scale is None:
        return None
    return Overflow(found.start(), attempted, scale, _seconds(line), is_told=attempted_is_told)


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
            found = overflow_in(line)
            if found is not None:
                yield from self.put(found)

    def rest(self, noticed: Noticed) -> Iterator[Row]:
        """As in `LineRows`."""
        noticed.skipped.append(Skipped(what="steps that were taken", reason=_WHY))
        return iter(())

    def put(self, found: Overflow) -> Iterator[Row]:
        """Yields the skipped step, and the last that was taken before it where one was."""
        steps = self._steps(found)
        if steps > 1:
            taken = {"skipped": 0.0} if self._scale is None else {"skipped": 0.0, "loss_scale": self._scale}
            yield Row(self._step + steps - 1, taken)
        self._step += steps
        yield Row(self._step, {"loss_scale": found.attempted, "skipped": 1.0})
        self._scale, self._at = found.scale, found.seconds

    def _steps(self, found: Overflow) -> int:
        """Returns how many steps this overflow comes after the one before."""
        at = found.seconds
        steps = 2 if self._scale is not None and found.has_grown(self._scale) else 1
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
