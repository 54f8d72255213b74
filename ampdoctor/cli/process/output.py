"""Render a report to its destinations.

They are checked before the work starts, and files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ampdoctor.cli.options.options import OutputOptions
from ampdoctor.cli.process.github_summary import append_summary, summary_file
from ampdoctor.cli.process.ranks import rank_file
from ampdoctor.cli.process.streams import NAMES_OF_STDOUT, STDOUT, report_stream, write_stdout
from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.paths import file_key
from ampdoctor.reports.formats import FORMATS, Canvas, Color, ReportFormat, renderer
from ampdoctor.workflows.output_files import refuse_part, refuse_unwritable, write_whole

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Report

WIDTH_WITHOUT_TERMINAL = 200
"""Columns where nobody has said how many: names in logs and pipes are then rarely folded."""
_USUAL_WIDTH = 80
_NARROWEST, _WIDEST = 20, 1000
"""Columns: what COLUMNS may say."""


@dataclass(frozen=True, slots=True)
class Destination:
    """One rendering: `file` is a path as the user wrote it, or `-` for stdout; `append`: it is a step's summary."""

    format: ReportFormat
    file: str
    append: bool = False


def destinations(
    options: OutputOptions,
    inputs: Iterable[str] = (),
    also: Iterable[str] = (),
    *,
    rank: int = 0,
    log: str | None = None,
) -> tuple[Destination, ...]:
    """Return where the report goes, files first and stdout last.

    Args:
        options: What the user asked for.
        inputs: Files and folders that the command reads: none of them may be written over.
        also: Further files that the command writes.
        rank: Of this process; one other than 0 has a file of its own for everything.
        log: The folder of its log, in which that file lies; None for a command that keeps none.

    Raises:
        UsageError: An unknown format, two reports for one place, a place that cannot be written, or an input.
    """
    wanted = [Destination(options.format, _place(options.output or STDOUT)), *map(_parse, options.report)]
    if options.github_summary:
        wanted.append(Destination("markdown", summary_file(), append=True))
    if rank:
        wanted = [Destination("jsonl", rank_file(rank, options.output, log))]
    taken: set[object] = set()
    for file in also:
        _refuse(file, inputs)
        if _identity(file) in taken:
            raise UsageError(f"two outputs for {file}: give one of them a file of its own")
        taken.add(_identity(file))
    for destination in sorted(wanted, key=lambda destination: destination.file != STDOUT):
        place = _identity(destination.file)
        if place is not None and place in taken:
            where = "standard output" if destination.file == STDOUT else destination.file
            raise UsageError(f"two outputs for {where}: give one of them a file of its own")
        taken.add(place)
        if destination.file != STDOUT and not (rank and log):  # a log's folder is made with the log
            try:
                _refuse(destination.file, inputs)
            except UsageError as error:
                if not rank:
                    raise
                raise UsageError(f"{error}: rank {rank} keeps its report beside the file of --output") from None
    return tuple(sorted(wanted, key=lambda destination: destination.file == STDOUT))


def refuse_unread(inputs: Iterable[str], files: Iterable[str]) -> None:
    """Refuse to write over files of a checkpoint that the work failed before it came to.

    Args:
        inputs: As for `destinations`.
        files: What is about to be written, and has been promised to `to_be_written`.

    Raises:
        UsageError: One of them is a file of a checkpoint that was to be read.
    """
    if not any(map(os.path.isfile, files)):
        return
    from ampdoctor.checkpoints.found import find

    for read in inputs:
        with contextlib.suppress(CheckpointError):  # no checkpoint, or why the work has failed
            find(read).open().close()


def deliver(report: Report, places: Iterable[Destination], options: OutputOptions) -> None:
    """Render and write the report everywhere it should go; one place that fails does not cost the others theirs.

    Raises:
        OutputError: A place could not be written: the first one, after all have been tried.
        StdoutClosedError: The reader of stdout has gone.
    """
    failed: Exception | None = None
    for place in places:
        try:
            _deliver_one(report, place, options)
        except Exception as error:  # noqa: BLE001 - raised below
            failed = failed or error
    if failed is not None:
        raise failed


def _deliver_one(report: Report, place: Destination, options: OutputOptions) -> None:
    if place.append:
        append_summary(report, place.file)
    elif place.file == STDOUT:
        write_stdout(_render(report, place.format, options, report_stream()))
    else:
        write_file(place.file, _render(report, place.format, options, None))


def canvas(stream: TextIO | None, *, color: Color, quiet: bool = False, verbose: int = 0) -> Canvas:
    """Return what a report is drawn for where it goes to `stream`, or to a file; `COLUMNS` is honoured."""
    interactive = stream is not None and stream.isatty()
    width = _columns_given() or (_width(stream) if interactive else WIDTH_WITHOUT_TERMINAL)
    return Canvas(width=width, stream=stream, color=color, quiet=quiet, verbose=verbose)


def write_file(file: str, text: str) -> None:
    """Write a report's text, whole or not at all.

    Raises:
        OutputError: It cannot be written; what was there before is still there.
    """
    write_whole(file, text.encode("utf-8", "backslashreplace"))


def _columns_given() -> int | None:
    """The width that COLUMNS asks for, where a report can be read in it."""
    given = os.environ.get("COLUMNS", "")
    if not re.fullmatch(r"[0-9]{1,4}", given) or not _NARROWEST <= int(given) <= _WIDEST:
        return None
    return int(given)


def _width(terminal: TextIO | None) -> int:
    """Columns of the terminal that takes the report, which descriptor 1 need not be."""
    if terminal is None:
        return _USUAL_WIDTH
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH


def _render(report: Report, form: ReportFormat, options: OutputOptions, stream: TextIO | None) -> str:
    place = canvas(stream, color=options.color, quiet=options.quiet, verbose=options.verbose)
    return renderer(form)(report, place)


def _parse(text: str) -> Destination:
    name, equals, file = text.partition("=")
    for form in FORMATS:
        if name == form and equals and file:
            return Destination(form, _place(file))
    known = ", ".join(FORMATS)
    raise UsageError(f"--report {text}: the form is FORMAT=FILE, where FORMAT is one of {known}")


def _place(file: str) -> str:
    return STDOUT if file in NAMES_OF_STDOUT else file


def _identity(file: str) -> object:
    """What two names of one place have in common; None: writing there twice does no harm."""
    if file != STDOUT:
        harmless = os.path.exists(file) and stat.S_ISCHR(os.stat(file).st_mode)  # noqa: PTH110, PTH116 - never raises
        return None if harmless else file_key(file)
    try:
        stream = report_stream()
        found = os.fstat(stream.fileno()) if stream is not None else None
    except (OSError, ValueError):  # a stdout that is no file
        return file
    return file if found is None else (found.st_dev, found.st_ino)


def _refuse(file: str, inputs: Iterable[str]) -> None:
    refuse_unwritable(file)
    for read in inputs:
        _refuse_input(file, read)
    place = Path(os.path.realpath(file))
    if place.suffix == ".py" and place.is_file():  # the factory's, or one that it imports
        raise UsageError(f"cannot write {file}: it is Python source, not a report; name another file")


def _refuse_input(file: str, read: str) -> None:
    """Refuse to write over an input, or into a folder that is one what would be read with it."""
    with contextlib.suppress(OSError, ValueError):  # one of them does not exist
        if Path(file).samefile(read):
            raise UsageError(f"cannot write {file}: it is what is to be read")
    refuse_part(file, read)
