"""A report in a notebook's cell: its verdict and findings as a small piece of HTML, without any script.

Colours are the notebook's own (`currentColor`, in shades), so that the piece reads in the light and in the dark.
"""

from __future__ import annotations

from ampdoctor.evidence.report import Report
from ampdoctor.reports.forms.to_html import environment
from ampdoctor.reports.words.finding_parts import finding_parts
from ampdoctor.reports.words.paste import setting_of

_IN_FULL = 20
"""Findings that get a line of their own; one NaN in a step makes hundreds of tensors NaN."""


def render_fragment(report: Report) -> str:
    """Return the report as a fragment of HTML; names in it are as inert as in the page."""
    return (
        environment()
        .get_template("fragment.html.j2")
        .render(
            report=report,
            findings=[finding_parts(finding, setting_of(report, finding)) for finding in report.findings[:_IN_FULL]],
            more=len(report.findings) - _IN_FULL,
        )
    )
