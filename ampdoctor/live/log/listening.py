"""Listeners of a log: each hears every line on a thread of its own, and costs neither training nor log anything."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic  # a script may put another in its place

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.run_log.details import DetailLine
from ampdoctor.evidence.run_log.lines import RunLine, Stamped
from ampdoctor.live.log.limits import Limits

Hear = Callable[[Stamped], None]
Say = Callable[[str], None]
_Waiting = tuple[int, Stamped]
NAP_S = 0.05
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
