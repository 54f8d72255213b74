"""Renders a report to its destinations.

They are checked before the work starts, and files are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ampdoctor.cli.options import OutputOptions
from ampdoctor.cli.process import NAMES_OF_STDOUT, STDOUT, report_stream, write_stdout
from ampdoctor.errors import CheckpointError, OutputError, UsageError
from ampdoctor.evidence.paths import file_key
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.live.log.facts import launched
from ampdoctor.reports.formats import FORMATS, Color, RenderOptions, ReportFormat, renderer
from ampdoctor.workflows.output_files import refuse_part, refuse_unwritable, write_whole

# -- one process of several, as torchrun starts them: rank 0 writes the output, any other rank a file of its own --

_NUMBER = re.compile("[0-9]{1,9}")  # a rank or world size; `int` itself refuses thousands of digits with its own error


def rank_of(environment: Mapping[str, str] | None = None) -> int:
    """Return this process's rank from torchrun, Slurm or Open MPI (0: a single process); may raise UsageError."""
    known = os.environ if environment is None else environment
    rank, size = known.get("RANK"), known.get("WORLD_SIZE")
    if not rank or not size:
        return launched(known).rank
    if not (_NUMBER.fullmatch(rank) and _NUMBER.fullmatch(size) and int(rank) < int(size)):
        raise UsageError(f"RANK={rank} and WORLD_SIZE={size} name no process of a group: unset them, or run torchrun")
    return int(rank)


def own_file(file: str, rank: int) -> str:
    """Return a file name for one rank: `ranges.npz` of rank 0 is `ranges.rank1.npz` of rank 1."""
    path = Path(file)
    return file if rank == 0 else str(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))


def of_rank(report: Report, rank: int) -> Report:
    """Return the report with the rank in the location of each finding."""
    if rank == 0:
        return report

    def placed(finding: Finding) -> Finding:
        return replace(finding, where=replace(finding.where, rank=rank))

    return replace(
        report,
        findings=tuple(map(placed, report.findings)),
        suppressed=tuple(replace(one, finding=placed(one.finding)) for one in report.suppressed),
    )


SUMMARY = "GITHUB_STEP_SUMMARY"
"""GitHub Actions' variable for the file to which `--github-summary` appends."""
WIDTH_WITHOUT_TERMINAL = 200  # columns for logs and pipes: so wide that names are rarely wrapped
_USUAL_WIDTH = 80
_NARROWEST, _WIDEST = 20, 1000  # values of COLUMNS that are accepted


@dataclass(frozen=True, slots=True)
class Destination:
    """One rendering: `file` is a path as the user wrote it, or `-` for stdout; `append` marks a step's summary."""

    format: ReportFormat
    file: str
    append: bool = False


def destinations(
    options: OutputOptions,
    inputs: Iterable[str] = (),
    also: Sequence[str] = (),
    *,
    rank: int = 0,
    log: str | None = None,
) -> tuple[Destination, ...]:
    """Return where the report goes, files first and stdout last.

    `inputs` are read by the command and must not be overwritten; `also` are other files that it writes. A rank other
    than 0 writes one file, in the folder `log` where there is one. Raises UsageError for an unknown format, two reports
    for one place, a place that cannot be written, or an input.
    """
    wanted = [Destination(options.format, _place(options.output or STDOUT)), *map(_parse, options.report)]
    if options.github_summary:
        summary = os.environ.get(SUMMARY)
        if not summary:
            raise UsageError(f"--github-summary is for a step of GitHub Actions: {SUMMARY} is not set")
        refuse_unwritable(summary)
        wanted.append(Destination("markdown", summary, append=True))
    if rank and log is not None:
        wanted = [Destination("jsonl", str(Path(log) / f"report.rank{rank}.jsonl"))]
    elif rank:
        wanted = [Destination("jsonl", str(Path(options.output or "").parent / f"rank{rank}.jsonl"))]
    wanted.sort(key=lambda destination: destination.file == STDOUT)
    taken: set[object] = set()
    for file in (*also, *(destination.file for destination in reversed(wanted))):  # a file that stdout goes to as well
        place = _identity(file)
        if place is not None and place in taken:
            where = "standard output" if file == STDOUT else file
            raise UsageError(f"two outputs for {where}: give one of them a file of its own")
        taken.add(place)
        if file in also or (file != STDOUT and not (rank and log)):  # a log's folder is created with the log
            _refuse(file, inputs)
    return tuple(wanted)


def refuse_unread(inputs: Iterable[str], files: Iterable[str]) -> None:
    """Raise UsageError if `files` would overwrite a checkpoint's file that the failed work had not reached yet."""
    if not any(map(os.path.isfile, files)):
        return
    from ampdoctor.checkpoints.found import find

    for read in inputs:
        with contextlib.suppress(CheckpointError):  # it is no checkpoint, or the reason why the work has failed
            find(read).open().close()


def deliver(
    report: Report, places: Iterable[Destination], options: OutputOptions, *, made_at: float | None = None
) -> None:
    """Render and write the report to all places; the first error is raised after all places were tried."""
    failed: Exception | None = None
    for place in places:
        try:
            stream = report_stream() if place.file == STDOUT else None
            seen = canvas(stream, color=options.color, quiet=options.quiet, verbose=options.verbose)
            text = renderer(place.format)(report, replace(seen, made_at=made_at))
            if place.append:
                with Path(place.file).open("a", encoding="utf-8", errors="backslashreplace") as summary:
                    summary.write(f"\n{text}")
            elif place.file == STDOUT:
                write_stdout(text)
            else:
                write_file(place.file, text)
        except OSError as error:
            failed = failed or OutputError(f"cannot write {place.file}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - raised below
            failed = failed or error
    if failed is not None:
        raise failed


def canvas(stream: TextIO | None, *, color: Color, quiet: bool = False, verbose: int = 0) -> RenderOptions:
    """Return the width, colour and detail for a report on `stream`, or in a file."""
    return RenderOptions(width=_columns(stream), stream=stream, color=color, quiet=quiet, verbose=verbose)


def write_file(file: str, text: str) -> None:
    """Write a report's text, whole or not at all; raises OutputError on failure, and keeps the old file."""
    write_whole(file, text.encode("utf-8", "backslashreplace"))


def _columns(stream: TextIO | None) -> int:
    """Return COLUMNS, where a report is readable in it, else the width of the terminal that shows the report."""
    given = os.environ.get("COLUMNS", "")
    if re.fullmatch(r"[0-9]{1,4}", given) and _NARROWEST <= int(given) <= _WIDEST:
        return int(given)
    if stream is None or not stream.isatty():
        return WIDTH_WITHOUT_TERMINAL
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH


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
    """Return a key that is equal for two names of one place; None where writing twice does no harm."""
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
        with contextlib.suppress(OSError, ValueError):  # one of them does not exist
            if Path(file).samefile(read):
                raise UsageError(f"cannot write {file}: it is what is to be read")
        refuse_part(file, read)
    place = Path(os.path.realpath(file))
    if place.suffix == ".py" and place.is_file():  # the factory, or a module that it imports
        raise UsageError(f"cannot write {file}: it is Python source, not a report; name another file")


# -- the repository of the working directory --
#
# A report's paths are relative to the working directory. GitHub needs paths for annotations and code scanning relative
# to the repository's root, so a report made below the root says where it was made.


def repository_root(folder: Path) -> Path | None:
    """Return the nearest folder, this or a parent, with `.git`: a folder, or the file of a worktree or submodule."""
    return next((level for level in (folder, *folder.parents) if os.path.exists(level / ".git")), None)  # noqa: PTH110 - never raises


def place_in_repository() -> dict[str, Any]:
    """Return the working directory's place for a report's target; {} at the root, or outside any repository."""
    try:
        here = Path.cwd()
    except OSError:  # the folder was deleted
        return {}
    root = repository_root(here)
    if root is None or root == here:
        return {}
    return {"repository": {"root": root.as_posix(), "folder": here.relative_to(root).as_posix()}}
