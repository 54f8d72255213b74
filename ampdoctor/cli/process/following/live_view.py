"""A running training on a terminal: what `ampdoctor health LOG --follow` draws, a few times a second, at any size."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampdoctor.cli.process.progress import duration
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.text import sparkline

if TYPE_CHECKING:
    from rich.text import Text

    from ampdoctor.evidence.log_records import StepLine
    from ampdoctor.health.latest import Event, Latest, Measure

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}
_QUIET_S = 60.0
"""Seconds without a line after which that is said."""
_LABEL, _VALUE = 15, 12
_MEASURES: tuple[tuple[Measure, str], ...] = (
    ("flushed_share", "flushed to zero"),
    ("headroom_binades", "least headroom"),
    ("zero_share", "most zeros"),
)
_SHORT_ROLES = {
    "gradient": "grad",
    "activation": "act",
    "activation_gradient": "act grad",
    "parameter": "param",
    "optimizer_state": "state",
}
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def status_line(latest: Latest) -> str:
    """Returns the state of a run in one plain line."""
    last = latest.last
    if last is None:
        return "no step yet"
    rates = latest.rates
    parts = [f"step {last.step}", f"loss {number(last.loss)}", f"norm {number(last.gradient_norm)}"]
    if last.loss_scale is not None:
        parts.append(f"scale {number(last.loss_scale)}")
    parts += [part for part in (_rate(rates.steps, "steps/s"), _rate(rates.tokens, "tokens/s")) if part]
    if latest.skipped:
        parts.append(f"{latest.skipped} skipped")
    return "  ".join(parts)


def event_line(event: Event) -> str:
    """Returns an event in one plain line."""
    at = f"step {event.step}  " if event.step is not None else ""
    what = event.level if event.kind == "alert" else event.kind
    return f"{at}{what}: {sanitise(event.says)}"


def number(value: float | None) -> str:
    """Returns a number in at most eight characters."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Inf" if value > 0.0 else "-Inf")
    if value and abs(math.log2(abs(value))) >= 14 and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return f"{value:.4g}"


def view(latest: Latest, *, name: str, width: int, height: int, plain: bool = False, now: float | None = None) -> Text:
    """Returns the whole picture, as many lines and columns as there are, and no more.

    Args:
        latest: What is known.
        name: Of the log, for people.
        width: Columns.
        height: Lines.
        plain: ASCII only.
        now: Seconds since 1970; None: the clock's.
    """
    from rich.text import Text

    head = _head(latest, name, time.time() if now is None else now)
    curves = _curves(latest, width, plain=plain)
    left = height - len(head) - len(curves)
    told = [event for event in latest.events if event.kind not in {"checkpoint", "end"}]
    checkpoints = [event for event in latest.events if event.kind == "checkpoint"][-1:]
    wanted = min(2 * len(told), 8)
    layers = _layers(latest, width, max(left - min(wanted, left // 3) - bool(wanted) - len(checkpoints), 0))
    left -= len(layers) + len(checkpoints)
    events = _events(told, left, width)
    lines = [*head, *curves, *layers, *events, *(_event(event) for event in checkpoints)][:height]
    for line in lines:
        line.truncate(width, overflow="crop" if plain else "ellipsis")
        line.no_wrap = True
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _head(latest: Latest, name: str, now: float) -> list[Text]:
    from rich.text import Text

    run, last, stamp = latest.run, latest.last, latest.stamp
    title = Text(sanitise(run.name if run is not None and run.name else name), style="bold")
    silent = 0.0 if stamp is None or not stamp.time_ms else max(now - stamp.time_ms / 1000, 0.0)
    if latest.end is not None:
        title.append("  ended", style="red" if latest.end.exit_code else "green")
    elif stamp is None:
        title.append("  waiting for its first line", style="cyan")
    elif silent > _QUIET_S:
        title.append(f"  silent for {duration(silent)}", style="yellow")
    else:
        title.append("  running", style="green")
    if run is not None and run.precision:
        title.append(f"  {sanitise(run.precision)}")
    if stamp is not None and stamp.world_size > 1:
        title.append(f"  rank {stamp.rank} of {stamp.world_size}")
    if last is None:
        return [title]
    return [title, Text("  ".join(_facts(latest, last)))]


def _facts(latest: Latest, last: StepLine) -> list[str]:
    rates, memory, lost = latest.rates, latest.memory_bytes, latest.lost
    facts = [
        f"step {last.step}",
        _rate(rates.steps, "steps/s"),
        _rate(rates.tokens, "tokens/s") or _rate(rates.samples, "samples/s"),
        "" if rates.data_share is None else f"{rates.data_share:.0%} of it waiting for data",
        "" if memory is None else f"{_amount(float(memory))}B of memory at most",
        f"{latest.skipped} skipped since step {latest.first_step}" if latest.skipped else "",
        f"{lost.steps + lost.details} lines lost" if lost is not None and lost.steps + lost.details else "",
    ]
    return [fact for fact in facts if fact]


def _curves(latest: Latest, width: int, *, plain: bool) -> list[Text]:
    from rich.text import Text

    steps: Sequence[StepLine] = tuple(latest.steps)
    rows = [
        ("loss", [step.loss for step in steps], False),
        ("gradient norm", [step.gradient_norm for step in steps], True),
        ("loss scale", [step.loss_scale for step in steps], True),
        ("learning rate", [next(iter(step.learning_rates), None) for step in steps], False),
    ]
    found = []
    for label, values, logarithmic in rows:
        if all(value is None for value in values):
            continue
        latest_value = next(value for value in reversed(values) if value is not None)
        line = Text(f"{label:<{_LABEL}}{number(latest_value):<{_VALUE}}")
        line.append(
            sparkline(values, width - _LABEL - _VALUE, logarithmic=logarithmic, plain=plain),
            style="red" if not math.isfinite(latest_value) else "blue",
        )
        found.append(line)
    return found


def _layers(latest: Latest, width: int, room: int) -> list[Text]:
    """The worst tensors: side by side where there is room, else the first measure that says something."""
    from rich.text import Text

    count = min(room - 1, 5)
    if latest.detail_step is None or count < 1:
        return []
    blocks = [(title, _worst(latest, measure, count)) for measure, title in _MEASURES]
    blocks = [(title, rows) for title, rows in blocks if rows]
    if not blocks:
        return []
    blocks = blocks[: max(width // 38, 1)]
    column = width // len(blocks)
    lines = [Text("".join(_cell(f"{title} at step {latest.detail_step}", column) for title, _ in blocks), style="bold")]
    for at in range(max(len(rows) for _, rows in blocks)):
        cells = [_row(*rows[at], column) if at < len(rows) else " " * column for _, rows in blocks]
        lines.append(Text("".join(cells)))
    return lines


def _worst(latest: Latest, measure: Measure, count: int) -> list[tuple[str, str, str]]:
    return [
        (f"{value:.1f} bits" if measure == "headroom_binades" else f"{value:.2%}", sanitise(name), role)
        for name, role, value in latest.worst(measure, count)
    ]


def _row(value: str, name: str, role: str, width: int) -> str:
    """A tensor's number and name; of a name that is too long the end says most."""
    role = _SHORT_ROLES.get(role, role)
    room = max(width - 12 - len(role) - 3, 4)
    shown = name if len(name) <= room else f"..{name[2 - room :]}"
    return _cell(f"{value:>9} {shown} {role}", width)


def _cell(text: str, width: int) -> str:
    return f"{text[: width - 1]:<{width}}"


def _events(events: Sequence[Event], room: int, width: int) -> list[Text]:
    """The last events, each in as many lines as there are for it: the newest in full, and as many more as fit."""
    from rich.text import Text

    shown: list[Text] = []
    for event in reversed(events):
        left = room - 1 - len(shown)
        lines = textwrap.wrap(event_line(event), max(width, 20), subsequent_indent="  ")
        if left < 1 or (shown and len(lines) > left):
            break
        shown = [Text(line, style=_STYLES[event.level]) for line in lines[:left]] + shown
    return [Text("what has happened", style="bold"), *shown] if shown else []


def _event(event: Event) -> Text:
    from rich.text import Text

    return Text(event_line(event), style=_STYLES[event.level])


def _rate(rate: float | None, unit: str) -> str:
    return "" if rate is None or rate <= 0.0 else f"{_amount(rate)} {unit}"


def _amount(value: float) -> str:
    size, letter = next((unit for unit in _UNITS if value >= unit[0]), (1.0, ""))
    return f"{value / size:.3g}{letter}"
