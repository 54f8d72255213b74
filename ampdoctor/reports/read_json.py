"""Reads a report back from JSON or JSON lines; rendered again, it is the same.

Numbers come back as they were written: floats with 6 significant digits. Derived fields (`url`, `fingerprint`,
`verified`, the `code` to paste) are computed anew and not read. A non-finite number in the free form of `evidence`,
`target` or `headroom` stays a word, since a name may be that word. Keys of free forms stay sorted, as in JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

from ampdoctor.errors import ReportError
from ampdoctor.evidence.json_records import MismatchError, RecordReader
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import (
    NOT_IN_HALF,
    SCHEMA_VERSION,
    STEPS_AFTER,
    Finding,
    Report,
    Skipped,
    SkippedKind,
    Verdict,
)
from ampdoctor.reports.json_report import DERIVED
from ampdoctor.reports.jsonl import HEADER, LISTS, SUMMARY

_READER = RecordReader(DERIVED)


def report_from_text(text: str) -> Report:
    """Return the report in a JSON or JSONL text, decided by the first line; ReportError for any other text."""
    first, _, rest = text.lstrip().partition("\n")
    begun = _parsed(first)
    if isinstance(begun, dict) and begun.get("type") == HEADER:
        return report_from_dict(_joined(_loaded(first, "line 1"), rest))
    return report_from_dict(_loaded(text, "the text"))


def report_from_dict(data: Any) -> Report:
    """Return the report in the values of a JSON report; raises ReportError where they are none."""
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ReportError("no report of ampdoctor: it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ReportError(
            f"a report of schema version {data['schema_version']}; this version of ampdoctor reads {SCHEMA_VERSION}"
        )
    try:
        report = _completed(_READER.read(Report, data))
    except MismatchError as mismatch:
        raise ReportError(f"no report that this version reads: {mismatch}") from None
    _refuse_contradictions(report)
    return report


def _completed(read: Report) -> Report:
    return replace(
        read,
        findings=tuple(map(_finding, read.findings)),
        skipped=tuple(replace(one, kind=_kind(one)) for one in read.skipped),
        suppressed=tuple(replace(one, finding=_finding(one.finding)) for one in read.suppressed),
    )


def _finding(read: Finding) -> Finding:
    """Returns the finding whose further addresses, which come as objects, are in the same part of a step."""
    places: Any = read.also
    return replace(read, also=tuple(Where(phase=read.where.phase, **place) for place in places)) if places else read


def _kind(skipped: Skipped) -> SkippedKind:
    """Return the kind of a skipped part from its text, since a report has nothing else."""
    if skipped.what.startswith(STEPS_AFTER):
        return "not_replayed"
    if skipped.what == NOT_IN_HALF:
        return "not_in_half"
    return "lfs_pointer" if "Git LFS pointer" in skipped.reason else "left_out"


def _refuse_contradictions(report: Report) -> None:
    """Refuse a report that no run can have produced, since it will decide an exit code."""
    # A watched run that died is sick and may have no finding, but then it is incomplete
    errors = any(finding.severity == "error" for finding in report.found)
    if report.complete and report.errors:
        raise ReportError("a report that contradicts itself: it is complete, and something could not be examined")
    allowed = ("sick", "not_judged") if errors else get_args(Verdict)
    if report.verdict not in allowed or (report.verdict == "sick" and report.complete and not errors):
        said = "an error was found" if errors else "no error was found"
        raise ReportError(f"a report that contradicts itself: its verdict is {report.verdict}, and {said}")
    if report.complete and not report.found and any(check.result == "found" for check in report.checks):
        raise ReportError("a report that contradicts itself: a check has found something, and no finding says what")


def _joined(header: dict[str, Any], rest: str) -> dict[str, Any]:
    *texts, last = rest.rstrip().split("\n")
    summary = _parsed(last)
    if not isinstance(summary, dict) or summary.get("type") != SUMMARY:
        raise ReportError("the report has been cut: its last line is no summary")
    lines = [_loaded(text, f"line {number}") for number, text in enumerate(texts, 2)]
    lists: dict[str, list[Any]] = {key: [] for key in LISTS.values()}
    for number, line in enumerate(lines, 2):
        key = LISTS.get(str(line.pop("type", ""))) if isinstance(line, dict) else None
        if key is None:
            raise ReportError(f"line {number} is of no type that a report has")
        lists[key].append(line)
    for key, entries in lists.items():
        announced = summary.get(key) or 0
        if announced != len(entries):
            raise ReportError(f"the summary counts {announced} {key}, and {len(entries)} are there")
    whole = {key: value for key, value in header.items() if key != "type"}
    return whole | {key: None if summary.get(key) is None else entries for key, entries in lists.items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _loaded(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ReportError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ReportError(f"{what} is no JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
