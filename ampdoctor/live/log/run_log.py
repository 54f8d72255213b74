"""The log of a training as the training sees it: lines are handed over, and nothing ever comes back."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, time_ns  # a script may put another in its place
from typing import Any

from ampdoctor.evidence.log_records import Line, RunLine, Stamp, Stamped
from ampdoctor.evidence.paths import log_name
from ampdoctor.live.log.files import Limits
from ampdoctor.live.log.thread import Handed, Hear, Listening, Make, Tray, Writer
from ampdoctor.package import version


def _silent(sentence: str) -> None:
    pass


def _nothing() -> None:
    pass


class RunLog:
    """Writes a run's log, on a thread of its own.

    Whatever happens to the disk, no method raises or waits, but for `flush` and `close`, which wait as long as they are
    told. What was handed over 0.2 seconds ago is on its way to the disk however the process ends. A forked process has
    no part in the log of its parent.

    Args:
        folder: It is made, by the thread.
        header: What begins each file; the version of ampdoctor and the number of the file are filled in.
        run_id: The run, the same on all ranks; None for one of its own.
        rank: Of this process.
        world_size: Number of processes.
        restarts: How often the run's processes have been started anew.
        say: Gets one sentence, at most once, if the log must be given up, and one for each listener that is dropped;
            it is called from one of the log's threads, or from whoever hands over a line.
        limits: Bounds.
        held: Nothing is written before `begin`, which may still say whose log it is.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: RunLine,
        *,
        run_id: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        restarts: int = 0,
        say: Callable[[str], None] = _silent,
        limits: Limits | None = None,
        held: bool = False,
    ) -> None:
        limits = Limits() if limits is None else limits
        self.folder = Path(folder)
        self.run_id = run_id or secrets.token_hex(8)
        origin = Stamp(run_id=self.run_id, rank=rank, world_size=world_size, restarts=restarts, time_ms=0)
        self._tray = Tray(origin, replace(header, tool=header.tool or version()), limits)
        self._writer = Writer(self._tray, self.folder, limits, say)
        self._limits, self._say = limits, say
        self._answering: tuple[Listening, ...] = ()
        self._process = os.getpid()
        self._attempts = 0
        self._closed, self._held = False, held
        if not held:
            self._start()
        atexit.register(self.close)

    def begin(self, *, run_id: str, rank: int, world_size: int) -> None:
        """Writes from now on, what was handed over before too, as the log of this rank; for one that was held."""
        if self._held and os.getpid() == self._process:
            self.run_id = run_id
            self._tray.become(run_id=run_id, rank=rank, world_size=world_size)
            self._start()

    def _start(self) -> None:
        self._held = False
        try:
            self._writer.start()
        except RuntimeError as error:  # no thread can be started any more
            self._writer.give_up(str(error))

    @property
    def path(self) -> Path:
        """The file that grows."""
        return self.folder / log_name(self._tray.origin.rank)

    @property
    def closed(self) -> bool:
        """No line is taken any more."""
        return self._closed

    @property
    def failed(self) -> str | None:
        """The sentence with which the log was given up; None while all is well."""
        return self._writer.failed

    def write(self, line: Line) -> None:
        """Hands a line over."""
        self._hand_over(line)

    def defer(self, make: Make) -> None:
        """Hands over what makes a line, or None, on the writer's thread: it waits among the details."""
        self._hand_over(make)

    def lose(self, steps: int) -> None:
        """Count steps of which there is no line, because their numbers have never arrived."""
        self._tray.unread(steps)

    def index_of(self, name: str) -> int:
        """Returns the index of a tensor's name, which stands in the log before any line that is handed over next."""
        return self._tray.index_of(name)

    def listen(
        self,
        hear: Hear,
        *,
        name: str = "what listens to the log",
        idle: Callable[[], None] = _nothing,
        end: Callable[[], None] = _nothing,
        dropped: Callable[[], None] = _nothing,
        answers: bool = False,
    ) -> Listening:
        """Has a listener told of each line that is written from now on, the header first, on a thread of its own.

        Nothing waits for a listener, but for `close`, which waits for all of them together as long as the limits say.
        One that raises or hangs is dropped with a sentence.

        Args:
            hear: Told of a line.
            name: What listens, in words, for that sentence.
            idle: Called on the same thread some times a second, where no line waits.
            end: Called on the same thread, as the last.
            dropped: Called once, on any thread, where it is dropped instead: what it waits for may be ended there.
            answers: What it hears it may answer with lines: at the end it is heard out before the others are let go.

        Returns:
            The listener's thread.
        """
        limits, say = self._limits, self._say
        one = Listening(hear, name=name, idle=idle, end=end, dropped=dropped, limits=limits, say=say)
        if self._idle():
            one.give_up("there is no log to listen to")
            return one
        one.put(self._tray.now(self._tray.header))
        try:
            one.start()
        except RuntimeError as error:  # no thread can be started any more
            one.give_up(str(error))
            return one
        self._writer.listeners += (one,)
        self._answering += (one,) if answers else ()
        return one

    def head(self, **changes: Any) -> None:
        """Changes fields of the header, which is then written anew.

        Raises:
            TypeError: A `RunLine` has no such field.
        """
        self._tray.head(**changes)

    def describe(self, **facts: Any) -> None:
        """Adds to what `run.json` says: JSON values, under any names."""
        tray = self._tray
        tray.facts = {"run_id": self.run_id, **tray.facts, **facts}

    def begin_attempt(self, branch: int | None = None) -> int:
        """Begins another attempt, after a rollback, and returns its number.

        Args:
            branch: The attempt that it goes on from; None for the one that was running.
        """
        before = self._tray.origin.attempt
        self._attempts += 1
        self._tray.origin = replace(
            self._tray.origin, attempt=self._attempts, branch=before if branch is None else branch
        )
        return self._attempts

    def last(self, count: int = 256) -> tuple[Stamped, ...]:
        """Returns the last steps that were handed over, the oldest first; `text_of` makes lines of them."""
        handed = list(self._tray.last)[-count:] if count > 0 else []
        return tuple(one.stamped(one.what) for one in handed if not callable(one.what))

    def flush(self, timeout: float = 1.0) -> bool:
        """Waits until everything that was handed over is with the operating system; False if that took too long."""
        if self._idle():
            return self._is_whole()
        reply: SimpleQueue[bool] = SimpleQueue()
        self._writer.calls.put(reply)
        deadline = monotonic() + timeout
        while self._writer.is_alive() and (left := deadline - monotonic()) > 0:
            try:
                return reply.get(timeout=min(left, 0.05))
            except Empty:
                continue
        return False

    def hear_out(self, timeout: float = 2.0) -> None:
        """Waits until whoever answers with lines has heard all that was handed over, as long as the limits say."""
        deadline = monotonic() + self._limits.farewell_seconds
        for one in self._answering:
            self.flush(timeout)
            one.heard(deadline - monotonic())

    def close(self, timeout: float = 2.0) -> bool:
        """Writes what waits, for at most so many seconds, and ends the thread; later lines are not taken.

        Listeners have `farewell_seconds` beside that, all of them together.

        Returns:
            Whether all of it is in the log; False in a forked process.
        """
        here = os.getpid() == self._process and threading.current_thread() is not self._writer
        if here and self._held:
            self._start()
        ours = here and not self._closed
        deadline = monotonic() + self._limits.farewell_seconds
        if ours:
            self.hear_out(timeout)
        self._end(timeout)
        if ours:
            self._let_go(deadline)
        return self._is_whole()

    def _end(self, timeout: float) -> None:
        if not self._idle():
            self._closed = True
            self._writer.calls.put(None)
            self._writer.join(timeout)
            if self._writer.is_alive():
                self._writer.give_up(f"its disk has not taken {self._tray.waiting + 1} lines within {timeout:g} s")
            atexit.unregister(self.close)

    def _let_go(self, deadline: float) -> None:
        """Ends the listeners; what was written to the end is what they hear."""
        listeners, self._writer.listeners, self._answering = self._writer.listeners, (), ()
        for one in listeners:
            one.let_go()
        for one in listeners:
            one.left(deadline, self._limits.farewell_seconds)

    def _hand_over(self, what: Line | Make) -> None:
        writer = self._writer
        if writer.failed is not None or self._closed or os.getpid() != self._process:
            return
        self._tray.put(Handed(self._tray.origin, time_ns(), what))
        if writer.hangs:
            writer.give_up("its disk hangs")

    def _idle(self) -> bool:
        """There is no thread to wait for, or it is the one that asks."""
        elsewhere = os.getpid() != self._process or threading.current_thread() is self._writer
        return elsewhere or self._held or self._closed or self.failed is not None

    def _is_whole(self) -> bool:
        return self.failed is None and os.getpid() == self._process
