"""Progress on stderr, drawn by Rich: only on a terminal, only for long work, and cleared afterwards.

It refreshes at the calls alone: Rich's thread would draw beside user code, which may fork or hold the interpreter.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from ampdoctor.reports.escape import sanitise
from ampdoctor.workflows.requests import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_DELAY = 1.0  # seconds: shorter work needs no progress
_INTERVAL = 0.1  # seconds between two updates


class ProgressLine:
    """One line that is rewritten in place; a `Progress`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last = -_INTERVAL
        self._phase: tuple[str, int | None] = ("", None)  # work of one kind, with a speed of its own
        self._bar: Bar | None = None

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Show the progress of `what`, at most ten times a second."""
        now = self._clock() - self._start
        if now < _DELAY or now - self._last < _INTERVAL:
            return
        self._last = now
        phase = ("" if unit else what, total)
        with suppress(OSError):  # a lost terminal must not end the work
            if self._bar is None or phase != self._phase or done < self._bar.tasks[0].completed:
                self.clear()
                self._phase, self._bar = phase, self._begun(total, unit)
            self._bar.update(self._bar.task_ids[0], completed=done, description=sanitise(what), refresh=True)

    def clear(self) -> None:
        """Remove the line."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.stop()

    def _begun(self, total: int | None, unit: str) -> Bar:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        columns: list[progress.ProgressColumn] = [progress.TimeElapsedColumn()]
        if total:
            whole = Column(no_wrap=True)
            sizes = (progress.DownloadColumn(table_column=whole), progress.TransferSpeedColumn(table_column=whole))
            counted = sizes if unit == "B" else (progress.MofNCompleteColumn(),)
            columns = [progress.BarColumn(20), *counted, progress.TimeRemainingColumn()]
        bar = progress.Progress(
            *columns,
            progress.TextColumn("{task.description}", markup=False),
            console=Console(file=self._stream, force_terminal=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=self._clock,
        )
        bar.add_task("", total=total)
        bar.start()
        return bar


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
