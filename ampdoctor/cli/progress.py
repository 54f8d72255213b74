"""Progress on stderr: only on a terminal, only for long work, and cleared afterwards.

Rich's progress bars bring a thread that draws beside user code, which may fork or hold the interpreter, and take time
to start. One line that is rewritten at each progress call needs neither.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from ampdoctor.cli.process import note
from ampdoctor.reports.escape import sanitise
from ampdoctor.workflows.requests import Progress

_DELAY = 1.0  # seconds: shorter work needs no progress
_INTERVAL = 0.1  # seconds between two updates
_SETTLED = 2.0  # seconds of a phase before its rate says anything about the time left
_MEMORY = 10.0  # seconds after which a speed has lost most of its weight in the rate
_BAR_CELLS = 20
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_CLEAR = "\r\x1b[K"


@dataclass(slots=True)
class _Phase:
    """Work of one kind, with a speed of its own."""

    name: tuple[str, int | None]
    start: float  # when it began, in seconds
    at: float  # when `done` was last updated
    done: int  # the progress at `at`
    rate: float | None = None  # recent parts a second; None before two updates

    def advance(self, done: int, now: float) -> None:
        """Update the rate: an exponential average over time, whatever the distance between updates."""
        passed = now - self.at
        if passed <= 0.0 or done == self.done:
            return
        speed = (done - self.done) / passed
        weight = 1.0 - math.exp(-passed / _MEMORY)
        self.rate = speed if self.rate is None else self.rate + weight * (speed - self.rate)
        self.at, self.done = now, done


class ProgressLine:
    """One line that is rewritten in place; a `Progress`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last = -_INTERVAL
        self._shown = False
        self._phase: _Phase | None = None

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Show the progress of `what`, at most ten times a second."""
        now = self._clock()
        phase = self._of(("" if unit else what, total), done, now)
        elapsed = now - self._start
        if elapsed < _DELAY or elapsed - self._last < _INTERVAL:
            return
        self._last = elapsed
        phase.advance(done, now)
        if total:
            parts = [_bar(done / total), _share(done, total, unit), _speed(phase, unit), _left(phase, total, now)]
        else:
            parts = [f"{done}" if done else "", f"{now - phase.start:.0f} s"]
        line = "  ".join(part for part in (*parts, sanitise(what)) if part)
        from rich.cells import set_cell_size

        room = shutil.get_terminal_size().columns - 1
        self._shown = True
        self._write(_CLEAR + set_cell_size(line, room).rstrip())

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._write(_CLEAR)

    def _of(self, name: tuple[str, int | None], done: int, now: float) -> _Phase:
        """Return the phase: a new one where another thing is counted, or the count starts again."""
        if self._phase is None or self._phase.name != name or done < self._phase.done:
            self._phase = _Phase(name, now, now, done)
        return self._phase

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # a lost terminal must not end the work
            self._shown = False


def _bar(share: float) -> str:
    full = min(int(share * _BAR_CELLS), _BAR_CELLS)
    return f"[{'#' * full}{'.' * (_BAR_CELLS - full)}]"


def _share(done: int, total: int, unit: str) -> str:
    if unit != "B":
        return f"{done}/{total}"
    size, name = _unit(total)
    return f"{done / size:.2f}/{total / size:.2f} {name}"


def _unit(amount: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if amount >= unit[0]), _UNITS[-1])


def _speed(phase: _Phase, unit: str) -> str:
    if not phase.rate:
        return ""
    if unit == "B":
        size, name = _unit(phase.rate)
        return f"{phase.rate / size:.2f} {name}/s"
    return f"{phase.rate:.1f}/s" if phase.rate >= 1.0 else f"{1.0 / phase.rate:.1f} s each"


def _left(phase: _Phase, total: int, now: float) -> str:
    if not phase.rate or now - phase.start < _SETTLED:
        return ""
    seconds = (total - phase.done) / phase.rate - (now - phase.at)
    return f"{duration(max(seconds, 0.0))} left"


def duration(seconds: float) -> str:
    """Returns a time in words: "12 s", "7 min 05 s", "2 h 10 min"."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def progress_line(*, wanted: bool) -> Iterator[Progress | None]:
    """Yield a progress line where one is wanted and stderr is a terminal that can rewrite a line, else None."""
    stream = sys.stderr
    if not wanted or stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    line = ProgressLine(stream)
    try:
        yield line
    finally:
        line.clear()


# -- an estimate for thousands of steps: printed once, on stderr, after the first steps --

TIMED = 3  # steps that are timed. The first one also creates the optimizer's state, so the median counts


class Estimate:
    """A `Progress` that times the first steps, prints an estimate for all, and passes everything on to `onto`."""

    def __init__(self, onto: Progress | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._onto = onto
        self._clock = clock
        self._times: list[float] = []

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Pass the progress of `what` on."""
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
