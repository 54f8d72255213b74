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
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """One line that is rewritten in place; a `Progress`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._last = -_INTERVAL
        self._shown = False

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Show how far `what` is, at most ten times a second."""
        elapsed = self._clock() - self._start
        if elapsed < _DELAY or elapsed - self._last < _INTERVAL:
            return
        self._last = elapsed
        self._shown = True
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
