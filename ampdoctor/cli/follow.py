"""Shows a log while it grows, until it has ended: as a picture on a terminal, elsewhere as plain lines."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

from ampdoctor.cli.options import OutputOptions
from ampdoctor.cli.process import note, report_stream, write_stdout
from ampdoctor.errors import OutputError
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.following import Follower
from ampdoctor.health.latest import Event, Latest, Measure
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import Color
from ampdoctor.reports.text import binary, number, size, sparkline

FRAME_S = 0.25  # seconds between two reads: nobody reads faster, and the log is only a twentieth of a second late
_EVERY = 100  # steps between two plain lines
_SLOW_S = 60.0  # seconds after which a step is printed anyway: some steps take minutes
_QUIET_S = 60.0  # seconds without a line after which the log counts as silent
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}
_LABEL, _VALUE = 15, 12  # columns before a curve
_MEASURES: tuple[tuple[Measure, str], ...] = (
    ("flushed_share", "flushed to zero"),
    ("log2_headroom", "least headroom"),
    ("zero_share", "most zeros"),
)
_WORST = 3  # tensors that are shown by each measure
_SHORT_ROLES = {
    "gradient": "grad",
    "activation": "act",
    "activation_gradient": "act grad",
    "parameter": "param",
    "optimizer_state": "state",
}


def status_line(latest: Latest, *, numbers: bool = True) -> str:
    """Returns the state of a run in one plain line; without `numbers` of the loss, which curves show."""
    last, rates, memory, lost = latest.last, latest.rates, latest.memory_bytes, latest.lost
    if last is None:
        return "no step yet"
    scale = None if last.loss_scale is None else f"scale {binary(last.loss_scale)}"
    parts = [f"loss {number(last.loss)}", f"norm {number(last.gradient_norm)}", scale] if numbers else []
    parts += [_rate(rates.steps, "steps/s"), _rate(rates.tokens, "tokens/s") or _rate(rates.samples, "samples/s")]
    if rates.data_share is not None:
        parts.append(f"{rates.data_share:.0%} of it waiting for data")
    parts += [None if memory is None else f"{size(memory)} of memory at most"]
    parts += [f"{latest.skipped} skipped since step {latest.first_step}" if latest.skipped else None]
    parts += [f"{lost.steps + lost.details} lines lost" if lost is not None and lost.steps + lost.details else None]
    return "  ".join([f"step {last.step}", *(part for part in parts if part)])


def _rate(rate: float | None, unit: str) -> str | None:
    return f"{rate:{',.0f' if rate >= 100 else '.3g'}} {unit}" if rate else None


def event_line(event: Event) -> str:
    """Returns an event in one plain line."""
    at = f"step {event.step}  " if event.step is not None else ""
    what = {"alert": event.level, "look": "looked at"}.get(event.kind, event.kind)
    return f"{at}{what}: {sanitise(event.says)}"


def view(latest: Latest, *, name: str, width: int, height: int, now: float | None = None) -> Text:
    """Returns the picture, at most `width` by `height`; `now` is in seconds since 1970."""
    lines = [_title(latest, name, time.time() if now is None else now)]
    if latest.last is not None:
        lines += [Text(status_line(latest, numbers=False)), *_curves(latest, width)]
    told = [event for event in latest.events if event.kind not in {"checkpoint", "end"}]
    told += [event for event in latest.events if event.kind == "checkpoint"][-1:]
    events = [
        Text(line, _STYLES[event.level])
        for event in told
        for line in textwrap.wrap(event_line(event), max(width, 20), subsequent_indent="  ")
    ]
    layers = _layers(latest)
    if len(lines) + len(layers) + min(len(events), 8) <= height:
        lines += layers
    lines += events[-max(height - len(lines), 0) :] if len(lines) < height else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines[:height])


def _title(latest: Latest, name: str, now: float) -> Text:
    run, stamp = latest.run, latest.stamp
    title = Text(sanitise(run.name if run is not None and run.name else name), style="bold")
    silent = 0.0 if stamp is None or not stamp.time_ms else now - stamp.time_ms / 1000
    if latest.end is not None:
        title.append("  ended", style="red" if latest.end.exit_code else "green")
    elif stamp is None:
        title.append("  waiting for its first line", style="cyan")
    elif silent > _QUIET_S:
        title.append(f"  silent for {silent / 60:.0f} min", style="yellow")
    else:
        title.append("  running", style="green")
    if run is not None and run.precision:
        title.append(f"  {sanitise(run.precision)}")
    if stamp is not None and stamp.world_size > 1:
        title.append(f"  rank {stamp.rank} of {stamp.world_size}")
    return title


def _curves(latest: Latest, width: int) -> list[Text]:
    rows = (
        ("loss", [step.loss for step in latest.steps], False),
        ("gradient norm", [step.gradient_norm for step in latest.steps], True),
        ("loss scale", [step.loss_scale for step in latest.steps], True),
        ("learning rate", [next(iter(step.learning_rates), None) for step in latest.steps], False),
    )
    found = []
    for label, values, logarithmic in rows:
        value = next((value for value in reversed(values) if value is not None), None)
        if value is not None:
            curve = sparkline(values, width - _LABEL - _VALUE, logarithmic=logarithmic)
            line = Text(f"{label:<{_LABEL}}{binary(value) if label == 'loss scale' else number(value):<{_VALUE}}")
            found.append(line.append(curve, style="blue" if math.isfinite(value) else "red"))
    return found


def _layers(latest: Latest) -> list[Text]:
    """Returns the worst tensors of the last look by each measure, below a title."""
    lines = [
        Text(
            f"{title:<{_LABEL}}{f'2^{value:.1f}' if measure == 'log2_headroom' else f'{value:.2%}':>9} "
            f"{sanitise(name)} {_SHORT_ROLES.get(role, role)}"
        )
        for measure, title in _MEASURES
        for name, role, value in latest.worst(measure, _WORST)
    ]
    return [Text(f"worst tensors at step {latest.detail_step}", style="bold"), *lines] if lines else []


def follow(
    log: str,
    output: OutputOptions,
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows a log, a folder with one, or the place where one will be, until its last line is there.

    It is shown on stderr where the report of `output` needs stdout. `pause` waits that many seconds. Raises
    CheckpointError where the file is not a log, OutputError where the output cannot be written, and StdoutClosedError
    where the reader of stdout has gone.
    """
    for_people = output.format == "human" and output.output is None
    stream = report_stream() if for_people else sys.stderr
    follower, latest = Follower(log), Latest(thresholds=thresholds)
    capable = os.environ.get("TERM") != "dumb" and sys.platform != "win32" and not output.quiet
    if stream and capable and stream.isatty() and (stream.encoding or "").lower().startswith("utf"):
        try:
            _draw(stream, output.color, follower, latest, name=log, pause=pause)
        except OSError as error:
            raise OutputError(f"the terminal cannot be written: {error.strerror or error}") from None
    else:
        write = write_stdout if for_people else lambda line: note(line.removesuffix("\n"))
        _print(write, 0 if output.quiet else _EVERY, follower, latest, log=log, pause=pause)


def _print(
    write: Callable[[str], None],
    every: int,
    follower: Follower,
    latest: Latest,
    *,
    log: str,
    pause: Callable[[float], None],
) -> None:
    """Prints events, and a step each `every` steps or from time to time; of those that were there, only the last."""
    waiting = caught_up = False
    said, said_at = -1, time.monotonic()

    def show_step(least: int) -> None:
        nonlocal said, said_at
        last, slow = latest.last, time.monotonic() - said_at > _SLOW_S
        if not every or last is None or last.step == said:
            return
        if said < 0 or slow or last.step < said or last.step - said >= least:
            said, said_at = last.step, time.monotonic()
            write(status_line(latest) + "\n")

    while True:
        for whole in follower.new():
            for event in latest.add(whole):
                write(event_line(event) + "\n")
            if caught_up:
                show_step(every)
        if follower.found is None and not waiting:
            note(f"ampdoctor: waiting for a log at {log}")
        waiting = True
        caught_up = caught_up or follower.found is not None
        show_step(every if latest.end is None else 1)
        if latest.end is not None:
            return
        pause(FRAME_S)


def _draw(
    stream: TextIO, color: Color, follower: Follower, latest: Latest, *, name: str, pause: Callable[[float], None]
) -> None:
    """Draws on the terminal's second screen; the last picture stays on the first. `name` is the log's."""
    never = color == "never"
    console = Console(
        file=stream,
        force_terminal=True,
        color_system=None if never else "auto",
        no_color=True if never else None,
        highlight=False,
        markup=False,
        emoji=False,
    )

    def drawn(lines_left: int = 0) -> Text:
        try:  # read each time: the user may have resized the window
            columns, rows = os.get_terminal_size(stream.fileno())
        except OSError:
            columns, rows = 0, 0
        console.size = ConsoleDimensions(columns or 80, rows or 24)
        return view(latest, name=name, width=console.width, height=console.height - lines_left)

    try:
        with Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live:
            while latest.end is None:
                live.update(drawn(), refresh=True)
                drawn_at = time.monotonic()
                for whole in follower.new():
                    latest.add(whole)
                    if time.monotonic() - drawn_at > FRAME_S:  # while a long existing log is read
                        live.update(drawn(), refresh=True)
                        drawn_at = time.monotonic()
                name = name if follower.found is None else follower.found.name
                if latest.end is None:
                    pause(FRAME_S)
    finally:
        if latest.last is not None:
            console.print(drawn(lines_left=1))
