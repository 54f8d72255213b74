"""The thread that writes a log, those of its listeners, and the queue between a training and them."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import RLock, Thread
from time import (
    monotonic,  # a script may put another in its place
    time_ns,  # a script may put another in its place
)
from typing import Any, TypeAlias

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.log_records import DetailLine, Line, LostLine, RunLine, Stamp, Stamped, StepLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.evidence.paths import log_name
from ampdoctor.live.log.files import Limits, Segments

# Listeners of a log: each hears every line on a thread of its own, and costs neither training nor log anything.


Hear = Callable[[Stamped], None]
Say = Callable[[str], None]
_Waiting = tuple[int, Stamped]
"""Between two looks at what waits."""


class Listening(Thread):
    """Tells a listener of each line, in the order in which they were written.

    Where lines come faster than they are heard, the oldest go: a listener is told of less, and nobody waits for it. One
    that raises, or does not come back, is told of nothing any more, with one sentence.

    Args:
        hear: Told of a line.
        name: What listens, in words.
        idle: Called where no line waits, some times a second.
        end: Called when all is heard, as the last.
        dropped: Called once where that does not come about, from any thread.
        limits: Bounds.
        say: Gets the sentence with which the listener is dropped.

    Attributes:
        failed: That sentence; None while all is well.
        dropped: Lines that it was not told of.
    """

    def __init__(
        self,
        hear: Hear,
        *,
        name: str,
        idle: Callable[[], None],
        end: Callable[[], None],
        dropped: Callable[[], None],
        limits: Limits,
        say: Say,
    ) -> None:
        super().__init__(name="ampdoctor-listener", daemon=True)
        self.failed: str | None = None
        self.dropped = 0
        self._hear, self._idle, self._end, self._dropped, self._what = hear, idle, end, dropped, name
        self._limits, self._say = limits, say
        self._calls: SimpleQueue[SimpleQueue[bool] | None] = SimpleQueue()
        self._count = itertools.count()
        self._lines: deque[_Waiting] = deque(maxlen=limits.lines)
        self._details: deque[_Waiting] = deque(maxlen=limits.heard_details)
        self._names: Stamped | None = None  # a header that was dropped, and that later lines speak of
        self._busy_since: float | None = None

    def put(self, whole: Stamped) -> None:
        """Hands a line on; it never waits."""
        if self.failed is not None:
            return
        waiting = self._details if isinstance(whole.line, DetailLine) else self._lines
        if len(waiting) == waiting.maxlen:
            self.dropped += 1
            with suppress(IndexError):
                oldest = waiting[0][1]
                self._names = oldest if isinstance(oldest.line, RunLine) else self._names
        waiting.append((next(self._count), whole))
        since = self._busy_since
        if since is not None and monotonic() - since > self._limits.hung_seconds:
            self.give_up(f"it has not come back for {self._limits.hung_seconds:g} s")

    def run(self) -> None:
        """The thread's work."""
        try:
            going = True
            while going and self.failed is None:
                call = self._nap()
                going = call is not None
                while self.failed is None and (whole := self._take()) is not None:
                    self._timed(partial(self._hear, whole))
                if isinstance(call, SimpleQueue):
                    call.put(True)
                elif going:
                    self._timed(self._idle)
            if self.failed is None:
                self._timed(self._end)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            named = "" if isinstance(error, AmpdoctorError) else type(error).__name__
            self.give_up(": ".join(part for part in (named, str(error)) if part))

    def give_up(self, reason: str) -> None:
        """Says once that it is told of nothing any more."""
        if self.failed is not None:
            return
        self.failed = f"{self._what} ends here: {reason}; the training goes on without it"
        self._lines.clear()
        self._details.clear()
        with suppress(Exception):
            self._dropped()
        with suppress(Exception):
            self._say(self.failed)

    def heard(self, timeout: float) -> bool:
        """Waits until all is heard that was handed on; False if that took too long."""
        reply: SimpleQueue[bool] = SimpleQueue()
        self._calls.put(reply)
        deadline = monotonic() + timeout
        while self._is_elsewhere() and (left := deadline - monotonic()) > 0:
            with suppress(Empty):
                return reply.get(timeout=min(left, NAP_S))
        return False

    def let_go(self) -> None:
        """Lets it end once all is heard; `join` waits for that."""
        self._calls.put(None)

    def left(self, deadline: float, seconds: float) -> None:
        """Waits for its end, until then at most.

        Args:
            deadline: Of `monotonic()`.
            seconds: How long that is, for the sentence.
        """
        if not self._is_elsewhere():
            return
        self.join(max(deadline - monotonic(), 0.0))
        if self.is_alive():
            self.give_up(f"it has not finished within {seconds:g} s")

    def _is_elsewhere(self) -> bool:
        return self.is_alive() and threading.current_thread() is not self

    def _nap(self) -> SimpleQueue[bool] | bool | None:
        """What was asked for in the meantime; False if nothing was."""
        try:
            return self._calls.get(timeout=NAP_S)
        except Empty:
            return False

    def _take(self) -> Stamped | None:
        """The oldest line that waits; None if none does."""
        names, self._names = self._names, None
        if names is not None:
            return names
        heads = [(waiting[0][0], waiting) for waiting in (self._lines, self._details) if waiting]
        return min(heads, key=lambda head: head[0])[1].popleft()[1] if heads else None

    def _timed(self, work: Callable[[], None]) -> None:
        self._busy_since = monotonic()
        try:
            work()
        finally:
            self._busy_since = None


# What lies between a training and the thread that writes its log.
#
# Nothing here takes a lock that the other side could hold: a training puts something down in a microsecond, whatever
# the writer does, also in a signal's handler. A deque's ends are safe from both sides.


Make: TypeAlias = Callable[[], Line | None]


class Handed:
    """A line, or what makes one, with the time at which it was handed over.

    Args:
        origin: The stamp, but for the time.
        time_ns: Nanoseconds since 1970-01-01 UTC.
        what: The line, or what makes it.
    """

    __slots__ = ("origin", "time_ns", "what")

    def __init__(self, origin: Stamp, time_ns: int, what: Line | Make) -> None:
        self.origin = origin
        self.time_ns = time_ns
        self.what = what

    def stamped(self, line: Line) -> Stamped:
        """Returns the whole line."""
        return Stamped(stamp=replace(self.origin, time_ms=self.time_ns // 1_000_000), line=line)


class Tray:
    """Holds what waits, within its bounds; the oldest details go first, and steps last.

    Args:
        origin: What every line carries, but for the time.
        header: What begins each file.
        limits: Bounds.

    Attributes:
        origin: See above; another one after a rollback.
        facts: What the run is, for `run.json`; another mapping for each change.
        last: The last steps.
        lost: What was handed over and will not be in the log.
    """

    def __init__(self, origin: Stamp, header: RunLine, limits: Limits) -> None:
        self.origin = origin
        self.facts: dict[str, Any] = {}
        self.last: deque[Handed] = deque(maxlen=limits.last)
        self.lost = LostLine()
        self._header = header
        self._names = {name: index for index, name in enumerate(header.tensors)}
        self._naming = RLock()
        self._lines: deque[Handed] = deque(maxlen=limits.lines)
        self._details: deque[Handed] = deque(maxlen=limits.details)

    def put(self, handed: Handed) -> None:
        """Puts a line down."""
        what = handed.what
        if isinstance(what, DetailLine) or callable(what):
            if len(self._details) == self._details.maxlen:
                self.lost = replace(self.lost, details=self.lost.details + 1)
            self._details.append(handed)
            return
        if isinstance(what, StepLine):
            self.last.append(handed)
        if len(self._lines) == self._lines.maxlen:
            self._count(self._lines[0].what)
        self._lines.append(handed)

    def now(self, line: Line) -> Stamped:
        """Returns the line as one that is handed over now."""
        return Handed(self.origin, time_ns(), line).stamped(line)

    def become(self, *, run_id: str, rank: int, world_size: int) -> None:
        """What waits, and all that follows, is of this run and of this rank; nobody may be taking anything up yet."""
        of = {"run_id": run_id, "rank": rank, "world_size": world_size}
        self.origin = replace(self.origin, **of)  # type: ignore[arg-type]
        self.facts = {**self.facts, "run_id": run_id} if "run_id" in self.facts else self.facts
        for one in (*self._details, *self._lines, *self.last):
            one.origin = replace(one.origin, **of)  # type: ignore[arg-type]

    def take(self) -> Handed | None:
        """Takes the next one up, details first, so that a run's end is the end of its log; None if nothing waits."""
        for waiting in (self._details, self._lines):
            try:
                return waiting.popleft()
            except IndexError:
                continue
        return None

    def clear(self) -> None:
        """Forgets what waits."""
        self._details.clear()
        self._lines.clear()

    @property
    def waiting(self) -> int:
        """Number of lines that wait."""
        return len(self._details) + len(self._lines)

    def index_of(self, name: str) -> int:
        """Returns the index of a tensor's name; a new one is added to the table."""
        found = self._names.get(name)
        if found is None:
            with self._naming:
                found = self._names.setdefault(name, len(self._names))
        return found

    @property
    def header(self) -> RunLine:
        """What begins a file, with the table of names; the same object as long as nothing has been added."""
        if len(self._header.tensors) != len(self._names):
            with self._naming:
                self._header = replace(self._header, tensors=tuple(self._names))
        return self._header

    def head(self, **changes: Any) -> None:
        """Changes fields of the header."""
        with self._naming:
            self._header = replace(self._header, **changes, tensors=tuple(self._names))

    def unmade(self) -> None:
        """A line could not be made into text."""
        self.lost = replace(self.lost, unmade=self.lost.unmade + 1)

    def unread(self, steps: int) -> None:
        """The numbers of steps have never arrived."""
        self.lost = replace(self.lost, steps=self.lost.steps + steps)

    def _count(self, what: Line | Make) -> None:
        step = isinstance(what, StepLine)
        self.lost = replace(self.lost, steps=self.lost.steps + step, others=self.lost.others + (not step))


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
