"""`follow`: shows a log while it grows, on a terminal as a picture, elsewhere as plain lines, until it has ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ampdoctor.cli.process.following.live_view import event_line, status_line, view
from ampdoctor.cli.process.streams import note, report_stream, write_stdout
from ampdoctor.errors import OutputError
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.following import Follower
from ampdoctor.health.latest import Latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from rich.console import Console
    from rich.text import Text

    from ampdoctor.cli.options.options import OutputOptions
    from ampdoctor.health.latest import Event
    from ampdoctor.reports.formats import Color

FRAME_S = 0.25
"""Between two looks: an eye does not read faster, and a log is a twentieth of a second behind its training."""
_EVERY = 100
"""Steps from one plain line to the next."""
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""What ends a process without a word: a `kill`, and a terminal that is closed."""
_SLOW_S = 60.0
"""Seconds after which a step is said anyway: some take minutes."""


def follow(
    log: str,
    output: OutputOptions,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    every: int = _EVERY,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows a log until its last line is there.

    Args:
        log: A log, a folder with one, or where one will be.
        output: As of the report that comes afterwards: where that takes standard output for itself, this is shown on
            stderr.
        thresholds: Of the judge.
        every: Steps from one plain line to the next.
        pause: Waits so many seconds.

    Raises:
        CheckpointError: There is a file, and it is no log.
        OutputError: What it is shown on cannot be written.
        StdoutClosedError: Whoever read it has gone.
    """
    for_people = output.format == "human" and output.output is None
    stream = report_stream() if for_people else sys.stderr
    follower, latest = Follower(log), Latest(thresholds=thresholds)
    if stream is not None and _is_drawn_on(stream) and not output.quiet:
        try:
            with _told_to_end():
                _draw(follower, latest, _Picture(stream, output.color, log), pause)
        except OSError as error:
            raise OutputError(f"the terminal cannot be written: {error.strerror or error}") from None
    else:
        write = write_stdout if for_people else _noted
        _print(_Lines(write, 0 if output.quiet else every), follower, latest, log, pause)


def _noted(text: str) -> None:
    note(text.removesuffix("\n"))


def _is_drawn_on(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a picture can be drawn anew."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and sys.platform != "win32"


class _ToldToEnd(KeyboardInterrupt):
    """A signal that ends a process has come; for process 1 of a container it does not, and it is as Ctrl-C there."""


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Lets what runs inside clean up before one of these signals ends the process, as it ends every other command.

    One that is ignored (`nohup`), or somebody else's, stays so.
    """
    came: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        if not came:  # another one while the first is being obeyed changes nothing
            came.append(number)
            raise _ToldToEnd

    mine = threading.current_thread() is threading.main_thread()
    taken = [one for one in _ENDING if mine and signal.getsignal(one) == signal.SIG_DFL]
    try:
        for one in taken:
            signal.signal(one, end)
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), came[0])


class _Lines:
    """Says what has happened, and now and then a step.

    Args:
        write: Takes a line with its end.
        every: Steps from one line to the next; 0 for none.
    """

    def __init__(self, write: Callable[[str], None], every: int) -> None:
        self._write, self._every = write, every
        self._said, self._said_at = -1, time.monotonic()

    def happened(self, events: Iterable[Event]) -> None:
        """Something has."""
        for event in events:
            self._write(event_line(event) + "\n")

    def step(self, latest: Latest, *, least: int | None = None) -> None:
        """Says the last step, if that is so many after the one that was said; None: as many as are usual."""
        last, least = latest.last, self._every if least is None else least
        slow = time.monotonic() - self._said_at > _SLOW_S
        if not self._every or last is None or last.step == self._said:
            return
        if self._said < 0 or slow or last.step < self._said or last.step - self._said >= least:
            self._said, self._said_at = last.step, time.monotonic()
            self._write(status_line(latest) + "\n")


def _print(lines: _Lines, follower: Follower, latest: Latest, log: str, pause: Callable[[float], None]) -> None:
    """Plain lines; of what was there before, no more steps than the last."""
    waiting = caught_up = False
    while True:
        for whole in follower.new():
            lines.happened(latest.hear(whole))
            if caught_up:
                lines.step(latest)
        if follower.found is None and not waiting:
            note(f"ampdoctor: waiting for a log at {log}")
        waiting = True
        caught_up = caught_up or follower.found is not None
        lines.step(latest, least=1 if latest.end is not None else None)
        if latest.end is not None:
            return
        pause(FRAME_S)


def _draw(follower: Follower, latest: Latest, picture: _Picture, pause: Callable[[float], None]) -> None:
    """Draws on the terminal's second screen; what the picture was in the end stays on the first."""
    from rich.live import Live

    console = picture.console
    try:
        with Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live:
            while latest.end is None:
                live.update(picture.drawn(latest), refresh=True)
                drawn_at = time.monotonic()
                for whole in follower.new():
                    latest.hear(whole)
                    if time.monotonic() - drawn_at > FRAME_S:  # a long log that was there before
                        live.update(picture.drawn(latest), refresh=True)
                        drawn_at = time.monotonic()
                if follower.found is not None:
                    picture.name = follower.found.name
                if latest.end is None:
                    pause(FRAME_S)
    finally:
        if latest.last is not None:
            console.print(picture.drawn(latest, lines_left=1))


class _Picture:
    """Draws for a terminal at the size that it has by then.

    Args:
        stream: The terminal.
        color: As of a report.
        name: Of the log.
    """

    def __init__(self, stream: TextIO, color: Color, name: str) -> None:
        self.console = _console(stream, color)
        self.name = name
        self._stream = stream
        self._plain = not (stream.encoding or "").lower().startswith("utf")

    def drawn(self, latest: Latest, *, lines_left: int = 0) -> Text:
        """Returns it, with so many lines of the terminal left free."""
        width, height = _size(self._stream)
        from rich.console import ConsoleDimensions

        self.console.size = ConsoleDimensions(width, height)
        return view(latest, name=self.name, width=width, height=height - lines_left, plain=self._plain)


def _console(stream: TextIO, color: Color) -> Console:
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        color_system="auto" if color != "never" else None,
        no_color=True if color == "never" else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines, asked anew each time: the user may have drawn the window wider."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24
