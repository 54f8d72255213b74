"""The JSONL renderer: the JSON report as a stream, one object a line, each with its `type`.

First comes a `report` line with everything but the lists, then a line for each of their entries, last a `summary` line
that counts them: a stream without it has been cut. `report-line.schema.json` beside this file defines the form. Nothing
of the JSON report is lost, and `read_json` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping

from ampdoctor.evidence.report import Report
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.json_report import report_as_dict, strict_json_line

HEADER, SUMMARY = "report", "summary"
LISTS: Mapping[str, str] = {
    "finding": "findings",
    "suppressed": "suppressed",
    "check": "checks",
    "skipped": "skipped",
    "error": "errors",
    "tensor": "tensors",
}
"""The type of a line, and the list of the JSON report that it belongs to, in the order of the lines."""


def render_jsonl(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as JSON lines (ASCII, keys sorted)."""
    header = report_as_dict(report)
    lists = {key: header.pop(key) for key in LISTS.values()}
    lines = [{"type": HEADER, **header}]
    lines += [{"type": kind, **entry} for kind, key in LISTS.items() for entry in lists[key] or ()]
    counts = {key: None if entries is None else len(entries) for key, entries in lists.items()}
    lines.append({"type": SUMMARY, "verdict": report.verdict, "complete": report.complete, **counts})
    return "".join(strict_json_line(line) for line in lines)
