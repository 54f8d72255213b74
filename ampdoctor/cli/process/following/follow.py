"""`follow`: shows a log while it grows, on a terminal as a picture, elsewhere as plain lines, until it has ended."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from ampdoctor.cli.process.following.live_view import event_line, status_line, view
from ampdoctor.cli.process.streams import note, report_stream, write_stdout
from ampdoctor.errors import OutputError
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.health.following import Follower
from ampdoctor.health.latest import Latest
from ampdoctor.reports.forms.canvas import Color

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds

FRAME_S = 0.25
"""Between two looks: an eye does not read faster, and a log is a twentieth of a second behind its training."""
_EVERY = 100
"""Steps from one plain line to the next."""
_SLOW_S = 60.0
"""Seconds after which a step is said anyway: some take minutes."""


def follow(
    log: str,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    color: Color = "auto",
    quiet: bool = False,
    every: int = _EVERY,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Finding, ...]:
    """Shows a log until its last line is there, and returns the findings of its alerts.

    Args:
        log: A log, a folder with one, or where one will be.
        thresholds: Of the judge.
        color: As of a report.
        quiet: Only what has happened, and no steps.
        every: Steps from one plain line to the next.
        pause: Waits so many seconds.

    Raises:
        CheckpointError: There is a file, and it is no log.
        OutputError: Standard output cannot be written.
    """
    stream = report_stream()
    if stream is None:
        raise OutputError("standard output is closed, and --follow has nowhere to show anything")
    follower, latest = Follower(log), Latest(thresholds=thresholds)
    if _is_drawn_on(stream) and not quiet:
        _draw(follower, latest, _Picture(stream, color, log), pause)
    else:
        _print(follower, latest, log, pause, every=0 if quiet else every)
    return tuple(latest.findings)


def _is_drawn_on(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a picture can be drawn anew."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and sys.platform != "win32"


def _print(follower: Follower, latest: Latest, log: str, pause: Callable[[float], None], *, every: int) -> None:
    """Plain lines: what has happened, and now and then a step. Of what was there before, what has happened alone."""
    waiting, caught_up, said, said_at = False, False, -1, time.monotonic()
    while True:
        for whole in follower.new():
            for event in latest.hear(whole):
                write_stdout(event_line(event) + "\n")
            last = latest.last
            if caught_up and every and last is not None and (last.step - said >= every or last.step < said):
                said, said_at = last.step, time.monotonic()
                write_stdout(status_line(latest) + "\n")
        last = latest.last
        due = not caught_up or time.monotonic() - said_at > _SLOW_S
        if every and last is not None and last.step != said and (due or latest.end is not None):
            said, said_at = last.step, time.monotonic()
            write_stdout(status_line(latest) + "\n")
        if latest.end is not None:
            return
        if follower.found is None and not waiting:
            waiting = True
            note(f"ampdoctor: waiting for a log at {log}")
        caught_up = caught_up or follower.found is not None
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
