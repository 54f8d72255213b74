"""Render a report to its destinations.

They are checked before the work starts, and files appear whole or not at all.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, get_args

from ampdoctor.cli.options import Color, OutputOptions, ReportFormat
from ampdoctor.cli.streams import OutputError, write_stdout
from ampdoctor.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ampdoctor.evidence.report import Report

STDOUT = "-"
WIDTH_WITHOUT_TERMINAL = 200
"""Columns where nobody has said how many: names in logs and pipes are then rarely folded."""


@dataclass(frozen=True, slots=True)
class Destination:
    """One rendering: `file` is a path, or `-` for stdout."""

    format: ReportFormat
    file: str


def destinations(options: OutputOptions) -> tuple[Destination, ...]:
    """Return where the report goes, files first and stdout last.

    Raises:
        UsageError: An unknown format, two reports for one place, or a place that cannot be written.
    """
    wanted = [Destination(options.format, options.output or STDOUT), *map(_parse, options.report)]
    taken: set[str] = set()
    for destination in wanted:
        place = destination.file if destination.file == STDOUT else os.path.realpath(destination.file)
        if place in taken:
            where = "standard output" if place == STDOUT else destination.file
            raise UsageError(f"two reports for {where}: give one of them a file of its own")
        taken.add(place)
        if destination.file != STDOUT:
            _refuse_unwritable(destination.file)
    return tuple(sorted(wanted, key=lambda destination: destination.file == STDOUT))


def deliver(report: Report, places: Iterable[Destination], options: OutputOptions) -> None:
    """Render and write the report everywhere it should go."""
    for place in places:
        stream = sys.stdout if place.file == STDOUT else None
        text = _render(report, place.format, options, stream)
        if place.file == STDOUT:
            write_stdout(text)
        else:
            write_file(place.file, text)


def render_text(show: Callable[[Console], None], stream: TextIO | None, color: Color) -> str:
    """Return what `show` prints to a console that is like `stream`; None stands for a file.

    `NO_COLOR`, `FORCE_COLOR`, `TERM=dumb` and `COLUMNS` are honoured; `color` other than auto overrides the first
    three. Rich writes to the stream that it is given even while it captures, so it is given a buffer and the
    stream's traits.
    """
    from rich.console import Console

    interactive = stream is not None and stream.isatty()
    like = Console(file=stream if stream is not None else io.StringIO(), force_terminal=None if stream else False)
    console = Console(
        file=io.StringIO(),
        width=like.width if interactive or os.environ.get("COLUMNS", "").isdigit() else WIDTH_WITHOUT_TERMINAL,
        force_terminal={"auto": like.is_terminal, "always": True, "never": False}[color],
        color_system="standard" if color == "always" else "auto",
        no_color={"auto": None, "always": False, "never": True}[color],
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        show(console)
    return "\n".join(line.rstrip(" ") for line in capture.get().split("\n"))  # table cells are padded


def write_file(file: str, text: str) -> None:
    """Write a file whole or not at all; a pipe or device is written directly.

    Raises:
        OutputError: It cannot be written; what was there before is still there.
    """
    path = Path(os.path.realpath(file))
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from error


def _render(report: Report, form: ReportFormat, options: OutputOptions, stream: TextIO | None) -> str:
    if form == "json":
        from ampdoctor.reports.to_json import render_json

        return render_json(report)
    from ampdoctor.reports.human import render_human

    def show(console: Console) -> None:
        render_human(report, console, quiet=options.quiet, verbose=options.verbose)

    return render_text(show, stream, options.color)


def _parse(text: str) -> Destination:
    name, equals, file = text.partition("=")
    for form in get_args(ReportFormat):
        if name == form and equals and file:
            return Destination(form, file)
    known = ", ".join(get_args(ReportFormat))
    raise UsageError(f"--report {text}: the form is FORMAT=FILE, where FORMAT is one of {known}")


def _refuse_unwritable(file: str) -> None:
    path = Path(os.path.realpath(file))
    if path.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {file}: the folder {path.parent.name or path.parent} does not exist")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {file}: permission denied")
