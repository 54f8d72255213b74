"""The log of a training, from the training's side: it hands lines over, and gets nothing back."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, time_ns  # bound here, because a script may patch them
from typing import Any

from ampdoctor.evidence.log_records import Line, LogRecord, RunLine, Stamp
from ampdoctor.evidence.paths import log_name
from ampdoctor.live.log.thread import Limits, Listening, LogQueue, Make, OnLine, QueuedLine, Writer
from ampdoctor.package import version


class RunLog:
    """Writes a run's log in `folder` on a thread; only `flush` and `close` wait. With `held`, not before `begin`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: RunLine,
        *,
        run_id: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        restarts: int = 0,
        say: Callable[[str], None] = lambda _: None,
        limits: Limits | None = None,
        held: bool = False,
    ) -> None:
        limits = Limits() if limits is None else limits
        self.folder = Path(folder)
        self.run_id = run_id or secrets.token_hex(8)
        origin = Stamp(run_id=self.run_id, rank=rank, world_size=world_size, restarts=restarts, time_ms=0)
        self._tray = LogQueue(origin, replace(header, tool=header.tool or version()), limits)
        self._writer = Writer(self._tray, self.folder, limits, say)
        self._limits, self._say = limits, say
        self._answering: tuple[Listening, ...] = ()
        self._process = os.getpid()
        self._closed, self._held = False, held
        if not held:
            self._start()
        atexit.register(self.close)

    def begin(self, *, run_id: str, rank: int, world_size: int) -> None:
        """Ends `held`: writes all lines, earlier ones too, as the log of this rank."""
        if self._held and os.getpid() == self._process:
            self.run_id = run_id
            self._tray.become(run_id=run_id, rank=rank, world_size=world_size)
            self._start()

    def _start(self) -> None:
        self._held = False
        try:
            self._writer.start()
        except RuntimeError as error:  # the process can start no more threads
            self._writer.give_up(str(error))

    @property
    def path(self) -> Path:
        """The running file."""
        return self.folder / log_name(self._tray.origin.rank)

    @property
    def closed(self) -> bool:
        """Whether no line is taken any more."""
        return self._closed

    @property
    def failed(self) -> str | None:
        """The sentence with which the log was given up, if it was."""
        return self._writer.failed

    def write(self, what: Line | Make) -> None:
        """Hands a line over, or a function that makes one, or None, on the writer's thread."""
        if self.failed is None and not self._closed and os.getpid() == self._process:
            self._tray.put(QueuedLine(self._tray.origin, time_ns(), what))

    def lose(self, steps: int) -> None:
        """Counts steps without a line, because their numbers never arrived."""
        self._tray.unread(steps)

    def index_of(self, name: str) -> int:
        """Returns the index of a tensor's name; the log contains the name before any line that is handed over next."""
        return self._tray.index_of(name)

    def listen(
        self,
        on_line: OnLine,
        *,
        name: str = "what listens to the log",
        idle: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
        dropped: Callable[[], None] = lambda: None,
        answers: bool = False,
    ) -> Listening:
        """Calls a listener for each line from now on, the header first, on its own thread, as a `Listening`."""
        limits, say = self._limits, self._say
        one = Listening(on_line, name=name, idle=idle, end=end, dropped=dropped, limits=limits, say=say)
        if self._idle():
            one.give_up("there is no log to listen to")
            return one
        one.put(self._tray.now(self._tray.header))
        try:
            one.start()
        except RuntimeError as error:  # the process can start no more threads
            one.give_up(str(error))
            return one
        self._writer.listeners += (one,)
        self._answering += (one,) if answers else ()
        return one

    def head(self, **changes: Any) -> None:
        """Changes fields of the header, which is then written again; raises TypeError for an unknown field."""
        self._tray.head(**changes)

    def describe(self, **facts: Any) -> None:
        """Adds JSON values, under any names, to `run.json`."""
        tray = self._tray
        tray.facts = {"run_id": self.run_id, **tray.facts, **facts}

    def last(self, count: int = 256) -> tuple[LogRecord, ...]:
        """Returns the last steps that were handed over, the oldest first; `text_of` turns them into text."""
        handed = list(self._tray.last)[-count:] if count > 0 else []
        return tuple(one.stamped(one.what) for one in handed if not callable(one.what))

    def flush(self, timeout: float = 1.0) -> bool:
        """Waits until all lines are with the operating system; False after the timeout."""
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

    def drain(self, timeout: float = 2.0) -> None:
        """Waits until the listeners that answer have received all lines, within the limits."""
        deadline = monotonic() + self._limits.close_timeout
        for one in self._answering:
            self.flush(timeout)
            one.wait(deadline - monotonic())

    def close(self, timeout: float = 2.0) -> bool:
        """Writes the waiting lines within `timeout` seconds; returns whether the log is complete (False in a fork)."""
        here = os.getpid() == self._process and threading.current_thread() is not self._writer
        if here and self._held:
            self._start()
        ours = here and not self._closed
        deadline = monotonic() + self._limits.close_timeout
        if ours:
            self.drain(timeout)
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
        """Ends the listeners, after they have received all lines that were written."""
        listeners, self._writer.listeners, self._answering = self._writer.listeners, (), ()
        for one in listeners:
            one.let_go()
        for one in listeners:
            one.left(deadline, self._limits.close_timeout)

    def _idle(self) -> bool:
        """Whether there is no thread to wait for, or this is that thread."""
        elsewhere = os.getpid() != self._process or threading.current_thread() is self._writer
        return elsewhere or self._held or self._closed or self.failed is not None

    def _is_whole(self) -> bool:
        return self.failed is None and os.getpid() == self._process
