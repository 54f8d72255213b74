"""`--github-summary`: the report as Markdown at the end of the step's summary, a file that GitHub names and shows."""

from __future__ import annotations

import os

from ampdoctor.cli.process.streams import note
from ampdoctor.errors import OutputError, UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.output_files import refuse_unwritable

VARIABLE = "GITHUB_STEP_SUMMARY"
MAX_BYTES = 1024 * 1024
"""Of all that a step leaves there; above it GitHub shows none of it (docs.github.com, "Step isolation and limits")."""


def summary_file() -> str:
    """The file that takes the summary.

    Raises:
        UsageError: There is none, or it cannot be written.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        raise UsageError(f"--github-summary is for a step of GitHub Actions: {VARIABLE} is not set")
    refuse_unwritable(file)
    return file


def append_summary(report: Report, file: str) -> None:
    """Append the report, whole or not at all; a line where it does not fit beside what is there.

    Raises:
        OutputError: The file cannot be written; what was there before is still there.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _append(descriptor, report)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from error


def _append(descriptor: int, report: Report) -> None:
    from ampdoctor.reports import text as words
    from ampdoctor.reports.escape import prose
    from ampdoctor.reports.markdown import render_markdown

    before = os.fstat(descriptor).st_size
    short = f"\nampdoctor {report.command}: {prose(words.verdict(report))}; the report does not fit in this summary\n"
    fitting = (text.encode() for text in (f"\n{render_markdown(report)}", short))
    data = next((text for text in fitting if before + len(text) <= MAX_BYTES), None)
    if data is None:
        note("ampdoctor: the step's summary is full; the report is not in it")
        return
    written = os.write(descriptor, data)
    if written < len(data):
        os.ftruncate(descriptor, before)
        raise OSError(f"only {written} of {len(data)} bytes fit")
