"""How long a run of thousands of steps will take: said once, on stderr, when the first steps are done."""

from __future__ import annotations

import time
from collections.abc import Callable

from ampdoctor.cli.process.progress import ProgressLine, duration
from ampdoctor.cli.process.streams import note
from ampdoctor.workflows.requests import Progress

TIMED = 3
"""Steps that are timed. The first makes the optimizer's state and may be slower: the one in the middle counts."""


class Estimate:
    """A `Progress` that times the first steps, says what all of them come to, and hands everything on.

    Args:
        onto: Whom to hand on to; None where no line is shown.
        clock: Gives seconds.
    """

    def __init__(self, onto: Progress | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._onto = onto
        self._clock = clock
        self._times: list[float] = []

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Hand on how far `what` is."""
        if total is not None and done == len(self._times) <= TIMED:
            self._times.append(self._clock())
            if done == TIMED < total:
                self._say(total)
        if self._onto is not None:
            self._onto(what, done, total, unit=unit)

    def _say(self, total: int) -> None:
        each = sorted(end - begin for begin, end in zip(self._times, self._times[1:], strict=False))[TIMED // 2]
        if isinstance(self._onto, ProgressLine):
            self._onto.clear()
        left = duration(each * (total - TIMED))
        note(f"ampdoctor: {total:,} steps at {each:.2g} s: {left} if none fails; Ctrl-C reports what is known by then")
