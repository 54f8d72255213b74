"""The human report as plain text, for places that are no terminal: a test's failure, a log."""

from __future__ import annotations

import io

from rich.console import Console

from ampdoctor.evidence.report import Report
from ampdoctor.reports.forms.human import render_human

WIDTH = 100
"""Columns: a failed test is read in a terminal, and in logs that fold what is longer."""


def plain_text(report: Report, *, quiet: bool = False, verbose: int = 0, width: int = WIDTH) -> str:
    """Return what `render_human` prints, without colour.

    Args:
        report: What to show.
        quiet: As for `render_human`.
        verbose: As for `render_human`.
        width: Columns.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        height=1,  # given, for Rich believes LINES whatever it says
        force_terminal=False,
        no_color=True,
        color_system=None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        render_human(report, console, quiet=quiet, verbose=verbose)
    return "\n".join(line.rstrip() for line in capture.get().split("\n")).strip("\n")
