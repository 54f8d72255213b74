"""Progress on stderr: only on a terminal, only for work that lasts, and gone afterwards."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ampdoctor.reports.sanitise import sanitise
from ampdoctor.workflows.request import Progress

_DELAY = 1.0  # seconds: shorter work needs no progress
_INTERVAL = 0.1  # seconds between two updates
_BAR_CELLS = 20
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """One line that is rewritten in place; a `Progress`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last = -_INTERVAL
        self._shown = False

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:
        """Show how far `what` is, at most ten times a second."""
        elapsed = self._clock() - self._start
        if elapsed < _DELAY or elapsed - self._last < _INTERVAL:
            return
        self._last = elapsed
        self._shown = True
        if unit == "B" and total:
            line = f"{_bar(done / total)} {_gigabytes(done, total)}, {done / elapsed / 1e9:.2f} GB/s  {sanitise(what)}"
        else:
            share = f"{done}" if total is None else f"{done}/{total}"
            line = f"{sanitise(what)} {share} ({elapsed:.0f} s)"
        self._write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # a lost terminal is no reason to lose the work
            self._shown = False


def _bar(share: float) -> str:
    full = min(int(share * _BAR_CELLS), _BAR_CELLS)
    return f"[{'#' * full}{'.' * (_BAR_CELLS - full)}]"


def _gigabytes(done: int, total: int) -> str:
    return f"{done / 1e9:.2f}/{total / 1e9:.2f} GB"


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
