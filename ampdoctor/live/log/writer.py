"""The thread that writes: what waits is made into text, goes to the file, and where that fails the log is given up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic  # a script may put another in its place
from typing import Any

from ampdoctor.evidence.codec import to_plain
from ampdoctor.evidence.run_log.details import DetailLine
from ampdoctor.evidence.run_log.files import log_name
from ampdoctor.evidence.run_log.lines import Line, LostLine, RunLine, Stamped
from ampdoctor.evidence.run_log.text import text_of
from ampdoctor.live.log.limits import Limits
from ampdoctor.live.log.listening import Listening
from ampdoctor.live.log.segments import Segments
from ampdoctor.live.log.tray import Handed, Tray

NAP_S = 0.05
"""Between two looks at what waits: a line is on its way to the disk after at most this time."""
LOST_EVERY_S = 60.0
"""Between two lines that count what was lost."""
AT_ONCE = 64
"""Tensors of a detail in one line: with 1.3 kB each, a line stays below 100 kB, and a reader may bound it."""

Reply = SimpleQueue[bool]


class Writer(Thread):
    """Writes what lies on a tray until it is told to stop, or the sink fails.

    Args:
        tray: What is written.
        folder: Where to; it is made.
        limits: Bounds.
        say: Gets the sentence with which the log is given up.

    Attributes:
        failed: That sentence; None while all is well.
        calls: Put a reply here to have everything written that waits, None to have the thread end as well.
        listeners: Each is told of a line when it is written; another tuple for each change.
    """

    def __init__(self, tray: Tray, folder: Path, limits: Limits, say: Callable[[str], None]) -> None:
        super().__init__(name="ampdoctor-log", daemon=True)
        self.failed: str | None = None
        self.calls: SimpleQueue[Reply | None] = SimpleQueue()
        self.listeners: tuple[Listening, ...] = ()
        self._tray, self._folder, self._limits, self._say = tray, folder, limits, say
        self._segments: Segments | None = None
        self._header: RunLine | None = None
        self._facts: Mapping[str, Any] = tray.facts
        self._lost = LostLine()
        self._told_lost = monotonic()
        self._busy_since: float | None = None
        self._suspected: float | None = None

    def run(self) -> None:
        """The thread's work."""
        try:
            with self._at_the_sink():
                self._segments = Segments(self._folder, self._tray.origin.rank, self._limits)
            going = True
            while going and self.failed is None:
                call = self._nap()
                going = call is not None
                self._drain(self._segments, ends=not going)
                if isinstance(call, SimpleQueue):
                    call.put(True)
        except OSError as error:
            self.give_up(error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self.give_up(f"{type(error).__name__}: {error}")
        finally:
            if self._segments is not None:
                self._segments.close()

    def give_up(self, reason: str) -> None:
        """Says once that there is no log any more."""
        if self.failed is not None:
            return
        path = self._folder / log_name(self._tray.origin.rank)
        self.failed = f"the log {path} ends here: {reason}; the training goes on without it"
        self._tray.clear()
        with suppress(Exception):
            self._say(self.failed)

    @property
    def hangs(self) -> bool:
        """The sink does not come back, and was seen so before: a process that slept is no sink that hangs."""
        since, now = self._busy_since, monotonic()
        if since is None or now - since < self._limits.hung_seconds:
            return False
        if self._suspected is None or self._suspected < since:
            self._suspected = now
        return now - self._suspected > self._limits.hung_seconds / 10

    def _nap(self) -> Reply | bool | None:
        """What was asked for in the meantime; False if nothing was."""
        try:
            return self.calls.get(timeout=NAP_S)
        except Empty:
            return False

    def _drain(self, segments: Segments, *, ends: bool) -> None:
        tray = self._tray
        self._describe(segments)
        while self.failed is None and (handed := tray.take()) is not None:
            for whole, text in self._texts(handed):
                self._begin(segments)
                self._write(segments, whole, text)
        self._begin(segments)
        self._tell_lost(segments, now=ends)

    def _texts(self, handed: Handed) -> Iterator[tuple[Stamped, str]]:
        """A whole line and its text, of a long detail several; nothing where there is none."""
        try:
            line = handed.what() if callable(handed.what) else handed.what
            wholes = [handed.stamped(part) for part in _parts(line)]
            yield from [(whole, text_of(whole)) for whole in wholes]
        except Exception:  # noqa: BLE001 - a line that cannot be made is counted, and costs no other
            self._tray.unmade()

    def _begin(self, segments: Segments) -> None:
        """A file begins with what its lines speak of, and has it anew where that has grown."""
        if segments.full:
            with self._at_the_sink():
                segments.next()
            self._header = None
        header = self._tray.header
        if header is not self._header:
            self._header = header
            self._write_now(segments, replace(header, segment=segments.number))

    def _write(self, segments: Segments, whole: Stamped, text: str) -> None:
        self._busy_since = monotonic()  # as below, in less time: this is done for each line
        try:
            segments.write(text.encode("ascii"))
        finally:
            self._busy_since = None
        for listener in self.listeners:
            listener.put(whole)

    def _write_now(self, segments: Segments, line: Line) -> None:
        whole = self._tray.now(line)
        self._write(segments, whole, text_of(whole))

    def _tell_lost(self, segments: Segments, *, now: bool) -> None:
        lost = replace(self._tray.lost, thinned=segments.thinned)
        if lost != self._lost and (now or monotonic() - self._told_lost > LOST_EVERY_S):
            self._lost, self._told_lost = lost, monotonic()
            self._write_now(segments, lost)

    def _describe(self, segments: Segments) -> None:
        facts = self._tray.facts
        if facts is self._facts:
            return
        self._facts = facts
        try:
            text = json.dumps(to_plain(facts, "run"), indent=2, allow_nan=False)
        except (TypeError, ValueError):
            self._tray.unmade()
            return
        with self._at_the_sink():
            segments.describe(text.encode("ascii") + b"\n")

    @contextmanager
    def _at_the_sink(self) -> Iterator[None]:
        self._busy_since = monotonic()
        try:
            yield
        finally:
            self._busy_since = None


def _parts(line: Line | None) -> list[Line]:
    if not isinstance(line, DetailLine) or len(line.tensors) <= AT_ONCE:
        return [] if line is None else [line]
    tensors = line.tensors
    return [replace(line, tensors=tensors[at : at + AT_ONCE]) for at in range(0, len(tensors), AT_ONCE)]
