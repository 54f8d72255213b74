"""`ampdoctor merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from ampdoctor.cli.options.flatten import flatten
from ampdoctor.cli.options.gate_options import GateOptions
from ampdoctor.cli.options.options import OutputOptions, refuse_empty
from ampdoctor.cli.process.action import Action, reporting
from ampdoctor.cli.process.bounded_file import read_text
from ampdoctor.errors import ReportError
from ampdoctor.evidence.report import Report
from ampdoctor.workflows.requests import Progress, SetAside

_MAX_REPORT = 256 * 1024 * 1024
"""Bytes: one with a histogram for each of 1,000 modules has some 10 MB."""


@flatten
def merge(
    reports: Annotated[
        list[str], typer.Argument(metavar="REPORT", help="Reports that were written with --format json or jsonl.")
    ],
    gates: GateOptions,
    output: OutputOptions,
) -> Action:
    """Show reports again, in any form; several become one.

    Several are those of the ranks of a job, or of several jobs: a finding of more than one rank is there once, with its
    ranks. Under torchrun rank 0 writes as it is told, and rank N its report to rankN.jsonl, in the folder of --output
    or here; give every rank --exit-zero, for torchrun ends the others when one exits with 1, and let `merge` judge.
    `run` needs no --exit-zero there, and keeps rank N's report beside its log, in report.rankN.jsonl.
    """
    for file in reports:
        refuse_empty("REPORT", file)

    def work(_: Progress | None, __: SetAside) -> Report:
        from ampdoctor.reports.merge import merge_reports

        return merge_reports([_read(file) for file in reports])

    return reporting(work, output, gates, reports)


def _read(file: str) -> Report:
    from ampdoctor.reports.read_json import report_from_text

    text = read_text(file, limit=_MAX_REPORT, what="the report")
    try:
        return report_from_text(text)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from None
