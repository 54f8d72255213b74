"""The human report as plain text, for places that are no terminal: a test's failure, a log."""

from __future__ import annotations

from ampdoctor.evidence.report import Report
from ampdoctor.reports.forms.canvas import Canvas
from ampdoctor.reports.forms.human import RENDERER

WIDTH = 100
"""Columns: a failed test is read in a terminal, and in logs that fold what is longer."""


def plain_text(report: Report, *, quiet: bool = False, verbose: int = 0, width: int = WIDTH) -> str:
    """Return the human report without colour.

    Args:
        report: What to show.
        quiet: As for `Canvas`.
        verbose: As for `Canvas`.
        width: Columns.
    """
    text = RENDERER(report, Canvas(width=width, color="never", quiet=quiet, verbose=verbose))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
