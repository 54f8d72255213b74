"""What lies between a training and the thread that writes its log.

Nothing here takes a lock that the other side could hold: a training puts something down in a microsecond, whatever the
writer does, also in a signal's handler. A deque's ends are safe from both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from time import time_ns  # a script may put another in its place
from typing import Any, TypeAlias

from ampdoctor.evidence.run_log.details import DetailLine
from ampdoctor.evidence.run_log.lines import Line, LostLine, RunLine, Stamp, Stamped, StepLine
from ampdoctor.live.log.limits import Limits

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
